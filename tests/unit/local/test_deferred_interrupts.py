"""Signals to `kvferry up` and `kvferry down` while they start or end processes."""

from __future__ import annotations

import itertools
import math
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from kvferry.errors import Interrupted
from kvferry_local.child import Pace
from kvferry_local.cluster import _deferred_interrupts

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    assert threading.current_thread() is threading.main_thread(), "only it has handlers"
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:  # a parent may have left some ignored, as nohup does
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_does_not_end_the_command_before_its_cleanup(number: signal.Signals) -> None:
    pace, second = Pace(), Pace()
    with _deferred_interrupts(pace):
        signal.raise_signal(number)
        noted = signal.getsignal(number)
    assert pace.is_interrupted
    assert signal.getsignal(number) is noted
    # The cleanup defers signals too, and leaves the command with handlers that only note them.
    with _deferred_interrupts(second):
        pass
    assert signal.getsignal(number) is noted


def test_handlers_are_as_before_where_nothing_interrupted() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with _deferred_interrupts(Pace()):
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.timeout(120)  # where a handler waits for a lock that its own thread holds
@pytest.mark.parametrize("moment", range(1, 60))
def test_a_signal_at_any_moment_of_a_wait_interrupts_it(moment: int) -> None:
    pace, moments = Pace(), itertools.count(1)

    def at_a_moment(_frame: object, _event: str, _argument: object) -> None:
        if next(moments) == moment:
            pace.interrupt()

    sys.setprofile(at_a_moment)
    try:
        with pytest.raises(Interrupted):
            pace.until(lambda: False, deadline=math.inf, step_s=1e-5)
    finally:
        sys.setprofile(None)
