"""Pauses before the idle steps of a prefill engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.engine.vllm.plugins.nixl import nixl_idle_steps


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(nixl_idle_steps, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


@pytest.mark.parametrize(
    ("num_tokens", "finished", "expected"),
    [
        (0, set(), 1),  # only keeps pages
        (512, set(), 0),
        (0, {"r"}, 0),  # the worker has yet to hear that a request's pages are kept from now on
        (512, {"r"}, 0),
    ],
)
def test_only_steps_that_neither_compute_nor_notify_pause(
    pauses: list[float], num_tokens: int, finished: set[str], expected: int
) -> None:
    scheduler = SimpleNamespace(build_connector_meta=lambda output: ("meta of", output))
    nixl_idle_steps.slow_idle_steps(scheduler)
    output = SimpleNamespace(total_num_scheduled_tokens=num_tokens, finished_req_ids=finished)
    assert scheduler.build_connector_meta(output) == ("meta of", output)
    assert pauses == [nixl_idle_steps.IDLE_STEP_PAUSE_S] * expected
