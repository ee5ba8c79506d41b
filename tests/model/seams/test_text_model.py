"""rendering/text_model.py, rendering/renderer.py: a gateway of the GPU image on a node without a GPU

Its folder has the tokenizer and the configuration, and no weights.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import model_folder
from support import gateway_without_gpu as gateway
from support.all_models import ALL_MODELS
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.vllm


_INT4 = {"bits": 4, "group_size": 128}
_FP8_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True}
_GROUP = {
    "targets": ["Linear"],
    "weights": {**_FP8_SCHEME, "strategy": "channel", "dynamic": False},
    "input_activations": {**_FP8_SCHEME, "strategy": "token", "dynamic": True},
}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm", **_INT4},
    "gptq": {"quant_method": "gptq", "desc_act": False, "sym": True, **_INT4},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": _GROUP},
        "ignore": ["lm_head"],
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []},
    # vLLM has it as a plugin.
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


def folder_of(quantization: str, into: Path) -> Path:
    """Copy the default model without its weights, as if they were quantized."""
    folder = into / quantization
    folder.mkdir()
    for file in Path(model_folder.resolve("default")).iterdir():
        if file.suffix not in model_folder.WEIGHT_SUFFIXES:
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    if values := QUANTIZATIONS[quantization]:
        config["quantization_config"] = values
    (folder / "config.json").write_text(json.dumps(config))
    assert sorted(file.name for file in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    return folder


def run(way: str, tmp_path: Path, *quantizations: str) -> subprocess.CompletedProcess[str]:
    folders = [str(folder_of(name, tmp_path)) for name in quantizations]
    return subprocess.run(
        [sys.executable, "-m", gateway.__name__, way, *folders],
        env=gateway.environment(tmp_path / "packages"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_imitated_wheel_finds_no_platform(tmp_path: Path) -> None:
    done = run("bare", tmp_path, "none")
    assert done.returncode
    assert "Failed to infer device type" in done.stderr


def test_arguments_of_engines_are_checked_without_a_gpu(tmp_path: Path) -> None:
    settings = ("engine.device=gpu", 'engine.args={"seed": 7}')
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", "config", "--vllm", "prefill", *(f"--set={each}" for each in settings)],
        env=gateway.environment(tmp_path / "packages"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--seed=7" in done.stdout
    assert '"kv_buffer_device": "cuda"' in done.stdout


def test_every_quantization_renders_without_a_gpu_and_without_weights(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    names = list(QUANTIZATIONS) if ALL_MODELS else ["none", "bitsandbytes"]
    done = run("gateway", tmp_path, *names)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))
    plain = answers["none"]
    for quantization, answer in answers.items():
        assert answer == plain, quantization
    tokenizer = Tokenizer.from_file(str(tmp_path / "none" / "tokenizer.json"))
    [completion] = plain["completion"]
    assert tokenizer.decode(completion["tokens"]) == gateway.BODIES["completion"]["prompt"]
    for name in ("chat", "tools", "required tool"):
        [chat] = plain[name]
        assert gateway.BODIES[name]["messages"][0]["content"] in tokenizer.decode(chat["tokens"])
        assert chat["parsed"]
    assert "tide" in plain["required tool"][0]["grammar"]
    assert json.loads(plain["grammar"][0]["grammar"]) == gateway.BODIES["grammar"]["structured_outputs"]
    assert plain["wrong grammar"].endswith("Rule 'nothing' not found")


def test_a_class_is_inspected_without_another_process_and_the_result_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import registry

    from kvferry.engine.vllm.rendering.text_model import inspect_models_in_this_process

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("another process")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)  # put back afterwards
    monkeypatch.setattr(registry, "subprocess", SimpleNamespace(run=refuse))
    model = registry.ModelRegistry.models["LlamaForCausalLM"]
    inspect_models_in_this_process()
    assert model.inspect_model_cls() == registry._ModelInfo.from_model_cls(model.load_model_cls())
    assert list(tmp_path.glob("modelinfos/*.json")), "processes that start later read it"
