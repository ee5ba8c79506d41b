"""bench/fuzz_transfer.py over engines that give a wrong answer, or fail a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress

from bench import fuzz_transfer
from bench.results import BenchFailed, Results
from kvferry.engine.base import EngineOutput, EngineRequest
from kvferry.engine.vllm import engine as vllm_engine
from kvferry.engine.vllm.start import arguments as engine_arguments
from kvferry.errors import EngineDead


@pytest.mark.parametrize(
    ("seventh", "failure"),
    [
        ([1, 3], r"transfer 7, fault none: \[1, 3\] instead of \[1, 2\]"),
        (EngineDead("the engine has ended"), "transfer 7, fault none: the engine has ended"),
    ],
)
async def test_the_first_failure_ends_all_transfers_with_the_counts_so_far(
    monkeypatch: pytest.MonkeyPatch, seventh: list[int] | EngineDead, failure: str
) -> None:
    async def answer(engine: Any, request: EngineRequest) -> tuple[list[int], EngineOutput]:
        if request.request_id != "decode-7":
            return [1, 2], EngineOutput((), "")
        if isinstance(seventh, EngineDead):
            raise seventh
        return seventh, EngineOutput((), "")

    async def prefill(engine: Any, request_id: str, prompt: Any) -> dict[str, Any]:
        return {}

    async def start_pair(**settings: Any) -> Any:
        return SimpleNamespace(prefill=None, decode=None, stop=stop)

    async def stop() -> None:
        stopped.append(True)

    stopped: list[bool] = []
    for module in (engine_arguments, vllm_engine):
        for name in ("CONNECTOR_MODULE", "CONNECTOR_CLASS"):
            monkeypatch.setattr(module, name, "")  # what run() sets ends with the test
    monkeypatch.setattr(engine_arguments, "TRANSFER_LEASE_S", 0)
    monkeypatch.setenv(fuzz_transfer.FAULTS_VARIABLE, "")
    monkeypatch.setattr(fuzz_transfer, "ODDS", {})
    monkeypatch.setattr(fuzz_transfer, "answer", answer)
    monkeypatch.setattr(fuzz_transfer, "prefill", prefill)
    monkeypatch.setattr(fuzz_transfer, "start_pair", start_pair)
    results = Results()
    with pytest.raises(ExceptionGroup) as caught:
        await fuzz_transfer.run(1000, 0, 1, 0.0, results, Progress(disable=True))
    (error,) = caught.value.exceptions
    assert isinstance(error, BenchFailed)
    with pytest.raises(BenchFailed, match=failure):
        raise error
    assert 7 < results.figures["transfers"] < 1000
    assert results.figures["spoilt"] == {"none": results.figures["transfers"]}
    assert stopped
