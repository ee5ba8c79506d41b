from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvferry_loadtest.result import Harness, Result, Server
from kvferry_loadtest.terminal import Progress, print_summary
from support.loadtest_results import result


def plain() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=160), file


def update(
    progress: Progress, elapsed_s: float, ok: int = 0, missed: int = 0, ttft_p50_ms: float | None = None
) -> None:
    progress.update(
        sent=ok + missed + 2,
        in_flight=2,
        ok=ok,
        missed=missed,
        planned=1200,
        elapsed_s=elapsed_s,
        ttft_p50_ms=ttft_p50_ms,
    )


def test_outside_a_terminal_there_is_a_line_every_five_seconds_and_one_at_the_end() -> None:
    console, file = plain()
    with Progress(console, "chat", expected_s=125) as progress:
        for at in range(128):
            update(progress, at / 10, ok=at, ttft_p50_ms=None if at < 20 else 180.0)
    lines = file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [f"chat: {at} of 2:05" for at in ("0:00", "0:05", "0:10", "0:12")]
    assert lines[0].endswith("sent 2 of 1,200, 2 in flight, 0 ok, 0 missed, TTFT p50 –")
    assert lines[-1].endswith("127 ok, 0 missed, TTFT p50 180 ms")
    assert "\x1b" not in file.getvalue()


def test_in_a_terminal_it_is_drawn_in_place_and_leaves_one_line() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    with Progress(console, "chat", expected_s=10) as progress:
        update(progress, 5.0, ok=40, missed=3, ttft_p50_ms=1240.0)
        assert "40 ok, 3 missed" in repr(progress)
    text = file.getvalue()
    assert "━" in text
    assert "0:05 of 0:10" in text
    assert "1.24 s" in text
    assert text.rstrip().endswith("chat: 0:05 of 0:10, sent 45 of 1,200, 2 in flight, 40 ok, 3 missed, TTFT p50 1.24 s")


def test_a_run_of_unknown_length_shows_what_has_ended() -> None:
    file = io.StringIO()
    with Progress(Console(file=file, width=100, force_terminal=True), "chat") as progress:
        update(progress, 3725.0, ok=600)
    assert "1:02:05" in file.getvalue()
    assert " of 1:" not in file.getvalue()


def test_an_error_of_the_run_is_not_swallowed() -> None:
    console, file = plain()
    progress = Progress(console, "chat")
    update(progress, 1.0)
    with pytest.raises(RuntimeError, match="stop"), progress:
        raise RuntimeError("stop")
    assert len(file.getvalue().splitlines()) == 1


def summary(of: Result) -> str:
    console, file = plain()
    print_summary(console, of)
    return file.getvalue()


def test_a_summary_has_figures_latencies_and_errors() -> None:
    text = summary(result("kvferry [x]", refused=9))
    for words in ("kvferry [x]", "TTFT p99", "Goodput", "floor 21.0 %", "TTFT from the scheduled time", "9 refused",
                  "2 × 503 no worker is ready", "lateness of the harness"):  # fmt: skip
        assert words in text
    assert "Do not trust" not in text


def test_a_summary_shows_missing_figures_as_dashes() -> None:
    text = summary(result(floor=None, server=Server(dialect="")))
    assert "–" in text
    assert "floor" not in text.replace("Times the floor", "")


def test_a_summary_begins_with_what_makes_it_worthless() -> None:
    bad = Harness(ok=False, reason="stalled 400 ms", cpu_share=1, lateness_p99_ms=90, loop_stall_max_ms=400)
    assert summary(result(harness=bad)).startswith("Do not trust these figures")
    assert "stalled 400 ms" in summary(result(harness=bad))
