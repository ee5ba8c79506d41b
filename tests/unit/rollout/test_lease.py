"""The Lease of a release: who acts, and when another one takes over."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvferry.errors import UnavailableError
from kvferry_operator.lease import DURATION_S, Lease, must_hold
from support.fake_leases import Clock, FakeLeases


@dataclass
class Two:
    """Two rollouts of one release, each with a clock of its own."""

    api: FakeLeases = field(default_factory=FakeLeases)

    def __post_init__(self) -> None:
        self.clock_a, self.clock_b = Clock(5_000.0), Clock(-70.0)
        self.a = Lease(self.api, "a", monotonic=self.clock_a)
        self.b = Lease(self.api, "b", monotonic=self.clock_b)


@pytest.fixture
def two() -> Two:
    return Two()


def test_another_one_waits_as_long_as_the_holder_renews(two: Two) -> None:
    for _ in range(10):
        assert two.a.take() == ""
        assert two.b.take() == "a"
        two.clock_b.now_s += DURATION_S - 1
    assert not two.b.is_held


def test_a_holder_that_is_silent_is_followed_and_can_change_nothing_more(two: Two) -> None:
    assert two.a.take() == ""
    assert two.b.take() == "a"
    two.clock_b.now_s += DURATION_S
    assert two.b.take() == ""
    with pytest.raises(UnavailableError, match="has just acquired its Lease"):
        must_hold(two.a)
    assert not two.a.is_held
    with pytest.raises(UnavailableError, match="b rolls this release out now"):
        must_hold(two.a)
    must_hold(two.b)


def test_times_that_another_clock_wrote_decide_nothing(two: Two) -> None:
    for year in ("1970", "2199"):
        assert two.a.take() == ""
        assert two.api.lease is not None
        two.api.lease["spec"] |= {"renewTime": f"{year}-01-01T00:00:00.000000Z", "leaseDurationSeconds": 1}
        assert two.b.take() == "a"
        two.clock_b.now_s += DURATION_S - 1
        assert two.b.take() == "a"


def test_a_lease_that_is_released_is_taken_at_once(two: Two) -> None:
    two.a.take()
    two.a.release()
    two.a.release()
    assert two.b.take() == ""
    assert two.api.lease is not None
    assert two.api.lease["spec"]["leaseTransitions"] == 2


def test_a_process_of_the_same_pod_goes_on_at_once(two: Two) -> None:
    two.a.take()
    assert Lease(two.api, "a", monotonic=two.clock_b).take() == ""


def test_two_that_take_it_at_once_are_not_both_holders(two: Two) -> None:
    two.a.take()
    two.a.release()
    free = two.api.read_lease()
    two.b.take()
    two.api.read_lease = lambda: free  # type: ignore[method-assign]  (as it was before b took it)
    with pytest.raises(UnavailableError, match="has just acquired its Lease"):
        two.a.take()
    assert two.b.is_held
    assert not two.a.is_held


def test_a_lease_that_cannot_be_renewed_is_not_held(two: Two) -> None:
    two.a.take()
    two.api.is_away = True
    with pytest.raises(UnavailableError):
        must_hold(two.a)
    assert not two.a.is_held
    two.api.is_away = False
    assert two.a.take() == ""
