"""bench/engine_device.py: engines of tests on the CPU, and on a GPU where the environment says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import deployments, engine_device, rag
from bench.engine_device import engine_config, model_config, on_gpu
from bench.gpu_pages import GpuPages
from kvferry import config as configuration
from kvferry_keeper.store.direct_io import aligned_buffer
from kvferry_loadtest.cli import load


def test_engines_are_on_the_cpu_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine_device.DEVICE, raising=False)
    config = engine_config("prefill", max_num_batched_tokens=256, args={"seed": 7})
    assert (on_gpu(), config.device, config.threads, config.args) == (False, "cpu", 1, {"seed": 7})
    assert model_config(max_model_len=64).dtype == "auto"


def test_a_gpu_s_engines_have_few_pages_and_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_device.DEVICE, "gpu")
    monkeypatch.setenv(engine_device.ENGINE, '{"enforce_eager": true, "max_num_seqs": 3, "args": {"seed": 1}}')
    monkeypatch.setenv(engine_device.OF_ROLE["decode"], '{"tensor_parallel_size": 2}')
    prefill, decode = (engine_config(role, max_num_seqs=9, args={"seed": 7}) for role in ("prefill", "decode"))
    assert (prefill.device, prefill.enforce_eager, prefill.max_num_seqs) == ("gpu", True, 3)
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (1, 2)
    assert prefill.args == {"num_gpu_blocks_override": 728, "seed": 1}
    assert model_config(path="m").dtype == "float32"
    monkeypatch.setenv(engine_device.MODEL, '{"dtype": "bfloat16"}')
    assert model_config(path="m").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (engine_device.DEVICE, "tpu", "'tpu': cpu or gpu"),
        (engine_device.ENGINE, "{", "no JSON"),
        (engine_device.ENGINE, "[]", "a JSON object is expected"),
        (engine_device.ENGINE, '{"no_such": 1}', "no_such"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        engine_config("decode")


def test_deployments_of_the_rag_load_take_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_device.DEVICE, "gpu")
    flags = [f"{key}={value}" for key, value in deployments.engines(deployments.Settings()).items()]
    config = configuration.load(flags=flags)
    assert (config.engine.device, config.model.dtype) == ("gpu", "bfloat16")
    # Ray gives a replica the GPU in parts.
    assert config.prefill.num_gpus + config.decode.num_gpus == 1
    assert config.engine.args == {"kv_cache_memory_bytes": 6 << 30}
    scenario = load("rag-chat", [*rag.overrides("rag-chat")], None)
    assert (scenario.num_sessions, scenario.objective.ttft_ms) == (64, 500)
    assert rag.overrides("another.toml") == ()
    monkeypatch.setattr(sys, "argv", ["rag", "--only", "serve-llm"])
    assert rag.main() == 2


def test_pages_go_to_the_device_and_back(tmp_path: Path) -> None:
    """On the CPU as the device: what is not tried here is pinning, and streams."""
    pytest.importorskip("torch")
    memory = aligned_buffer(2 * 4096)
    rows = [memory[:4096], memory[4096:]]
    rows[0][:], rows[1][:] = b"a" * 4096, b"b" * 4096
    pages = GpuPages(rows, device="cpu")
    rows[0][:] = b"c" * 4096
    assert (pages.is_equal(0), pages.is_equal(1)) == (False, True)
    pages.store(0)
    assert bytes(rows[0][:3]) == b"aaa"
    rows[1][:] = b"d" * 4096
    pages.load(1)
    assert pages.is_equal(1)
    pages.close()
