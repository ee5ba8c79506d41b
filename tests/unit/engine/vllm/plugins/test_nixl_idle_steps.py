"""When a prefill engine's step takes a nap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.engine.vllm.plugins import nixl_idle_steps


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(nixl_idle_steps, "time", SimpleNamespace(sleep=taken.append))
    return taken


@pytest.mark.parametrize(
    ("num_tokens", "finished", "naps_taken"),
    [
        (0, set(), 1),  # only keeps pages
        (512, set(), 0),
        (0, {"r"}, 0),  # the worker has yet to hear that a request's pages are kept from now on
        (512, {"r"}, 0),
    ],
)
def test_only_steps_with_nothing_to_do_or_tell_take_a_nap(
    naps: list[float], num_tokens: int, finished: set[str], naps_taken: int
) -> None:
    scheduler = SimpleNamespace(build_connector_meta=lambda output: ("meta of", output))
    nixl_idle_steps.slow_idle_steps(scheduler)
    output = SimpleNamespace(total_num_scheduled_tokens=num_tokens, finished_req_ids=finished)
    assert scheduler.build_connector_meta(output) == ("meta of", output)
    assert naps == [nixl_idle_steps.IDLE_STEP_PAUSE_S] * naps_taken
