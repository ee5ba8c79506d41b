"""`kvferry quality` on real engines: a wrong scale is found, and what cannot be measured is refused before."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.tiny_models import make_model
from kvferry import config as configuration
from kvferry.cli import main
from kvferry.config import EngineConfig, ModelConfig
from kvferry.engine.quality_report import why_untested
from kvferry.errors import UnsupportedEngine
from kvferry_plan.quality.report_file import write_report
from kvferry_plan.quality.samples import load_dataset
from support.all_models import only_with_all_models

pytestmark = pytest.mark.model


LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "hidden_size": 256, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "fp7"], "KV cache dtype 'fp7' is not known"),
        (["--kv-cache-dtype", "int8"], "attention on CPUs has no pages of type int8_per_token_head"),
        (["--kv-cache-dtype", "bf16", "--lengths", "9000"], "9000 and 64 scored tokens exceed the context of 8192"),
        (["--kv-cache-dtype", "bf16", "--baseline", "nvfp4"], "no pages of type nvfp4"),
        (["--kv-cache-dtype", "bf16", "--set", "engine.device=gpu"], "no GPU is here"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_an_engine_runs(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["quality", *arguments])
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_a_folder_without_heads_is_refused(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA.items() if name != "num_attention_heads"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = CliRunner().invoke(main, ["quality", "--kv-cache-dtype", "fp8", "--model", str(tmp_path)])
    assert (result.exit_code, "lacks num_attention_heads" in result.output) == (2, True), result.output


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    result = CliRunner().invoke(main, ["quality", "--kv-cache-dtype", "bf16", "--model", str(tmp_path)])
    assert (result.exit_code, "has no usable tokenizer" in result.output) == (2, True), result.output


def test_code_of_a_folder_is_not_run_whatever_a_terminal_would_answer(tmp_path: Path) -> None:
    """transformers asks, unless it is told not to."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    code = f"from transformers import PreTrainedTokenizerFast as Own\nopen({str(ran)!r}, 'w').close()\n"
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    given = ["--kv-cache-dtype", "bf16", "--model", str(tmp_path)]
    result = CliRunner().invoke(main, ["quality", *given], input="y\n")
    assert (result.exit_code, "custom code" in result.output) == (2, True), result.output
    assert not ran.exists()


def test_samples_that_are_equal_are_refused(tmp_path: Path) -> None:
    """Their intervals would be narrow for nothing."""
    text = tmp_path / "text.txt"
    text.write_text("One paragraph of a few words.\n\nAnother paragraph of a few words.", encoding="utf-8")
    given = ["--dataset", str(text), "--samples", "8", "--lengths", "32", "--tokens", "8"]
    result = CliRunner().invoke(main, ["quality", "--kv-cache-dtype", "bf16", *given])
    assert (result.exit_code, "--samples 8: only 2 of them differ at 32 tokens" in result.output) == (2, True)


def test_questions_are_whole_whatever_the_lengths_and_fit_the_context() -> None:
    from kvferry import model_folder
    from kvferry_plan.quality import measure as quality_measure

    folder = model_folder.resolve("default")
    settings = quality_measure.Settings(("bfloat16",), "auto", (32,), 2, 8, 2, 0.005, 60)
    lengths = {}
    for context in (8192, 256):
        config = configuration.load(flags=[f"model.max_model_len={context}"])
        _, tasks = quality_measure._make_samples(folder, config, context, (32,), settings, load_dataset(None))
        lengths[context] = max(map(len, tasks))
    assert lengths[8192] > 400
    assert lengths[256] == 256 - 24


@only_with_all_models
async def test_scales_that_are_wrong_by_eight_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On vLLM's own pages: keys and values are written with a scale of 8 and read with 1."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # of the extension, in vLLM's processes
    from kvferry.engine.vllm.engine import VllmEngine
    from kvferry_plan.quality.measure import Settings, measure

    folder = make_model("qwen3", tmp_path / "model")
    config = configuration.load(flags=[f"model.path={json.dumps(str(folder))}"])
    settings = Settings(
        dtypes=("fp8_e4m3",),
        baseline="auto",
        lengths=(64, 200),
        num_samples=3,
        num_scored_tokens=8,
        num_tasks=2,
        budget=0.005,
        timeout_s=250,
    )
    (plain,) = measure(config, settings, load_dataset(None), lambda line: None)
    said: list[str] = []
    spoiled = dataclasses.replace(settings, worker_extension="support.spoiled_scales.SpoiledScales")
    (report,) = measure(config, spoiled, load_dataset(None), said.append)
    # Random weights make even right scales cost much; wrong ones cost more by far.
    for right, wrong in zip(plain.lengths, report.lengths, strict=True):
        assert right.divergence_nats.high is not None
        assert wrong.divergence_nats.low is not None
        assert right.divergence_nats.high < wrong.divergence_nats.low, (right, wrong)
    assert report.verdict == "fail"
    assert [length.verdict for length in report.lengths] == ["fail", "fail"]
    assert (report.mode, report.kv_cache_dtype, report.baseline_kv_cache_dtype) == ("engine", "fp8_e4m3", "float32")
    assert "scales are not calibrated" in report.warnings[0]
    assert len(said) == 2 * (1 + 2 + 1)  # both engines: started, two lengths, tasks
    assert "verdict is 'fail'" in why_untested(report, max_model_len=208)

    # The file does not let an engine start, neither by its verdict nor for the type that the engine would have.
    file = tmp_path / "report.json"
    write_report(report, file)
    engine = VllmEngine(str(folder), ModelConfig(), EngineConfig(quality_report=file), producer=True)
    with pytest.raises(UnsupportedEngine, match=r"kv_cache_dtype 'fp8_e4m3'; 'float32' is configured.*'fail'"):
        await engine.start()
    await engine.stop()
