"""Whether the harness kept up. A load test that measures its own delays is worse than none."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Iterator, Sequence

from kvferry_loadtest.record import Record
from kvferry_loadtest.result import Harness

TICK_S = 0.005
# Requests that leave later than this are the harness's doing, not the server's ...
MAX_LATENESS_S = 0.005
# ... unless what is measured is so slow that it does not matter.
MAX_LATENESS_OF_TTFT = 0.02
# An event loop that runs this much of the time has a queue of its own.
MAX_CPU_SHARE = 0.9


class Watch:
    """Measures this process between `begin` and `end`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = 0.0
        self._stall_s = 0.0
        self._cpu_s = self._wall_s = 0.0

    def begin(self) -> None:
        self._cpu_s, self._wall_s = -time.process_time(), -time.monotonic()
        self._stall_s = 0.0
        self._ticked_s = time.perf_counter()
        self._tick()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._cpu_s += time.process_time()
        self._wall_s += time.monotonic()

    def _tick(self) -> None:
        now_s = time.perf_counter()
        self._stall_s = max(self._stall_s, now_s - self._ticked_s - TICK_S)
        self._ticked_s = now_s
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def verdict(self, records: Sequence[Record]) -> Harness:
        return judge(
            sorted(record.lateness_s for record in records if record.lateness_s is not None),
            sorted(record.ttft_sent_s for record in records if record.ttft_sent_s is not None),
            cpu_share=self._cpu_s / self._wall_s if self._wall_s else 0.0,
            stall_s=self._stall_s,
        )


def judge(lateness_s: Sequence[float], ttft_s: Sequence[float], *, cpu_share: float, stall_s: float) -> Harness:
    """Both sequences ascending."""
    late_s = lateness_s[min(len(lateness_s) - 1, int(len(lateness_s) * 0.99))] if lateness_s else 0.0
    median_s = ttft_s[len(ttft_s) // 2] if ttft_s else 0.0
    allowed_s = max(MAX_LATENESS_S, MAX_LATENESS_OF_TTFT * median_s)
    reasons = []
    if late_s > allowed_s:
        reasons.append(
            f"1 % of the requests left {late_s * 1e3:.1f} ms or more after they were due; "
            f"{allowed_s * 1e3:.1f} ms would do no harm here"
        )
    if cpu_share > MAX_CPU_SHARE:
        reasons.append(f"the harness used {cpu_share:.0%} of a core")
    return Harness(
        ok=not reasons,
        reason="; ".join(reasons),
        cpu_share=cpu_share,
        lateness_p99_ms=late_s * 1e3,
        loop_stall_max_ms=stall_s * 1e3,
    )


@contextlib.contextmanager
def punctual() -> Iterator[None]:
    """Fewer reasons to be late: no garbage collection while requests are timed, and a processor whenever one is wanted.

    Beside engines that keep every core busy, an ordinary process waits for one up to half a second (seen), however nice
    the others are: Linux shares processors among sessions first. Only root may ask for more; others run as they are.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with _first_in_line() if hasattr(os, "sched_setscheduler") else contextlib.nullcontext():
            yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextlib.contextmanager
def _first_in_line() -> Iterator[None]:
    before = os.sched_getscheduler(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, before, os.sched_param(0))
