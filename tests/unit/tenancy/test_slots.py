from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.tenancy.shares.slots import DecodeSlots


def fill(slots: DecodeSlots[int], now_s: float = 0.0) -> str:
    """Give away all slots that may be given; return the tenants in order."""
    begun = slots.num_streams + round(1000 * now_s)
    order = ""
    while (tenant := slots.next_tenant(now_s)) is not None:
        slots.begin(tenant, begun + len(order), now_s)
        order += tenant
        slots.check()
    return order


def slots_with(waiting: str, num_slots: int = 10, num_reserved: int = 0) -> DecodeSlots[int]:
    slots: DecodeSlots[int] = DecodeSlots(num_slots, num_reserved)
    for tenant in waiting:
        slots.wait(tenant, 0.0)
    return slots


def test_slots_go_by_streams_and_weight() -> None:
    slots = slots_with("a" * 20 + "b" * 20)
    slots.set_weight("a", 4.0)
    order = fill(slots)
    assert (order.count("a"), order.count("b")) == (8, 2)


def test_a_tenant_that_comes_back_gets_the_next_slots_and_no_more_than_its_share() -> None:
    slots = slots_with("n" * 30)
    fill(slots)
    for _ in range(9):
        slots.wait("p", 1.0)
    for stream in range(7):
        slots.end("n", stream, 1.0)
    assert sorted(fill(slots, 1.0)) == ["n"] * 2 + ["p"] * 5


def test_the_reserve_is_for_tenants_below_their_share() -> None:
    slots = slots_with("n" * 30, num_reserved=2)
    assert fill(slots) == "n" * 10  # alone, all of it is its share
    slots = slots_with("n" * 30 + "p", num_reserved=2)
    slots.set_weight("n", 100.0)
    assert sorted(fill(slots)) == ["n"] * 9 + ["p"]


def test_tenants_seen_lately_keep_the_reserve_free() -> None:
    slots = slots_with("p", num_reserved=2)
    fill(slots)
    slots.end("p", 0, 0.0)
    for _ in range(30):
        slots.wait("n", 1.0)
    assert fill(slots, 1.0) == "n" * 8
    assert fill(slots, 29.0) == ""
    assert fill(slots, 30.0) == "nn"  # p was not seen for 30 s


def slots_after(demand: int, num_free_s: float) -> DecodeSlots[int]:
    """Return 32 slots, of which up to 8 are kept for `p`, which wanted so many at once and has none since."""
    slots: DecodeSlots[int] = DecodeSlots(32, 1, 8)
    for _ in range(demand):
        slots.wait("p", 0.0)
    assert fill(slots) == "p" * demand
    for stream in range(demand):
        slots.end("p", stream, 0.1)
    for _ in range(60):
        slots.wait("n", num_free_s)
    return slots


@pytest.mark.parametrize(("demand", "num_kept"), [(1, 1), (3, 3), (8, 8), (20, 8)])
def test_as_many_slots_are_kept_as_a_tenant_lately_wanted(demand: int, num_kept: int) -> None:
    slots = slots_after(demand, 1.0)
    assert fill(slots, 1.0) == "n" * (32 - num_kept)
    for _ in range(demand):
        slots.wait("p", 1.0)
    assert fill(slots, 1.0) == "p" * num_kept


@pytest.mark.parametrize(("now_s", "num_kept"), [(0.2, 3), (4.9, 3), (5.0, 3), (9.9, 3), (10.0, 1)])
def test_slots_are_kept_for_the_period_of_a_peak_and_the_next_one(now_s: float, num_kept: int) -> None:
    assert fill(slots_after(3, now_s), now_s) == "n" * (32 - num_kept)


def test_tenants_that_want_nothing_any_more_claim_nothing() -> None:
    slots: DecodeSlots[int] = DecodeSlots(32, 0, 8)
    for number, tenant in enumerate("pqr"):
        slots.wait(tenant, 0.0)
        slots.begin(tenant, number, 0.0)
        slots.end(tenant, number, 0.0)
    for _ in range(60):
        slots.wait("n", 10.0)
    assert fill(slots, 10.0) == "n" * 32


def test_a_tenant_wanted_its_streams_and_what_waited_beside_them() -> None:
    slots: DecodeSlots[int] = DecodeSlots(32, 1, 8)
    for stream in range(2):
        slots.wait("p", 0.0)
        slots.begin("p", stream, 0.0)
    for _ in range(4):
        slots.wait("p", 0.1)
    for _ in range(4):
        slots.leave("p")
    for stream in range(2):
        slots.end("p", stream, 0.2)
    for _ in range(60):
        slots.wait("n", 1.0)
    assert fill(slots, 1.0) == "n" * 26


@pytest.mark.parametrize(("weight", "num_kept"), [(0.25, 6), (4.0, 8)])
def test_a_claim_is_at_most_a_share_by_weight(weight: float, num_kept: int) -> None:
    """Beside `n`, the share is 6.4 or 25.6 of 32 slots."""
    slots: DecodeSlots[int] = DecodeSlots(32, 1, 8)
    slots.set_weight("p", weight)
    for stream in range(8):
        slots.wait("p", 0.0)
        slots.begin("p", stream, 0.0)
    for stream in range(8):
        slots.end("p", stream, 0.1)
    for _ in range(60):
        slots.wait("n", 1.0)
    assert fill(slots, 1.0) == "n" * (32 - num_kept)


@pytest.mark.parametrize(("now_s", "num_kept"), [(0.25, 1), (0.5, 3)])
def test_claims_are_counted_every_half_second(now_s: float, num_kept: int) -> None:
    slots: DecodeSlots[int] = DecodeSlots(32, 1, 8)
    assert slots.next_tenant(0.0) is None
    for _ in range(3):
        slots.wait("p", 0.25)
    for _ in range(3):
        slots.leave("p")
    for _ in range(60):
        slots.wait("n", now_s)
    assert fill(slots, now_s) == "n" * (32 - num_kept)


def test_a_tenant_that_has_its_share_gets_nothing_of_the_reserve() -> None:
    slots = slots_with("aaaaabbbaaa", num_reserved=2)
    for stream, tenant in enumerate("aaaaabbb"):
        slots.begin(tenant, stream, 0.0)
    assert slots.next_tenant(0.0) is None
    slots.wait("b", 0.0)
    assert slots.next_tenant(0.0) == "b"


def test_tenants_that_were_not_seen_lately_have_no_share_whoever_was_seen_before_them() -> None:
    slots = slots_with("n" * 9, num_reserved=2)
    for stream in range(8):
        slots.begin("n", stream, 0.0)
    slots.wait("p", 1.0)
    slots.leave("p")
    assert slots.next_tenant(30.9) is None
    slots = slots_with("n" * 9, num_reserved=2)
    for stream in range(8):
        slots.begin("n", stream, 0.0)
    slots.wait("p", 1.0)
    slots.leave("p")
    assert slots.next_tenant(31.0) == "n"


def test_a_reserve_that_is_not_used_goes_within_ten_seconds() -> None:
    slots = slots_after(6, 4.0)
    assert fill(slots, 4.0) == "n" * 26
    assert fill(slots, 10.5) == "n" * 5, "one slot is kept for 30 s"


def test_no_slots_are_kept_for_those_that_have_theirs() -> None:
    slots: DecodeSlots[int] = DecodeSlots(32, 1, 8)
    for _ in range(4):
        slots.wait("p", 0.0)
    for _ in range(60):
        slots.wait("n", 0.0)
    order = fill(slots, 0.0)
    assert (order.count("p"), order.count("n")) == (4, 27)


def test_many_tenants_with_small_shares_claim_slots_together() -> None:
    slots: DecodeSlots[int] = DecodeSlots(64, 2, 8)
    for number in range(64):
        slots.wait(f"small{number}", 0.0)
        slots.begin(f"small{number}", number, 0.0)
    for number in range(64):
        slots.end(f"small{number}", number, 0.1)
    for _ in range(100):
        slots.wait("whale", 1.0)
    assert fill(slots, 1.0) == "whale" * 56


def test_many_light_tenants_get_into_the_reserve() -> None:
    slots: DecodeSlots[int] = DecodeSlots(10, 2)
    for number in range(100):
        slots.wait(f"small{number}", 0.0)
    slots.set_weight("whale", 100.0)
    for _ in range(50):
        slots.wait("whale", 0.0)
    streams = [slots.next_tenant(0.0)]
    while streams[-1] is not None:
        slots.begin(streams[-1], len(streams), 0.0)
        streams.append(slots.next_tenant(0.0))
    assert sum(tenant is not None and tenant.startswith("small") for tenant in streams) >= 2


def test_the_oldest_stream_of_the_tenant_furthest_above_its_share_is_preempted() -> None:
    slots = slots_with("n" * 10)
    fill(slots)
    assert slots.victim(0.0) is None  # no tenant below its share waits
    slots.wait("p", 0.0)
    assert slots.is_short(0.0)
    assert slots.victim(0.0) == ("n", 0)
    assert slots.victim(0.0, lambda stream: stream >= 3) == ("n", 3)
    assert slots.victim(0.0, lambda stream: stream > 9) is None
    slots.end("n", 0, 0.0)
    assert slots.victim(0.0) is None  # a slot is free
    assert fill(slots) == "p"


def test_the_victim_is_found_beyond_a_tenant_whose_streams_may_not_end() -> None:
    slots = slots_with("e" * 6 + "b" * 6, num_slots=12)
    order = fill(slots)
    of_e, of_b = ({stream for stream, tenant in enumerate(order) if tenant == name} for name in "eb")
    for tenant in "aaaa":
        slots.wait(tenant, 0.0)
    assert slots.victim(0.0, lambda stream: stream in of_b) == ("b", min(of_b))
    assert slots.victim(0.0, lambda stream: stream in of_e) == ("e", min(of_e))
    assert slots.victim(0.0, lambda _: False) is None
    slots.set_weight("b", 2.0)  # so that its streams are its share
    assert slots.victim(0.0, lambda stream: stream in of_b) is None


def test_the_victim_is_of_the_tenant_furthest_above_its_share() -> None:
    slots = slots_with("a" * 13 + "b" * 11, num_slots=24)
    for stream, tenant in enumerate("b" * 11 + "a" * 13):
        slots.begin(tenant, stream, 0.0)
    slots.wait("c", 0.0)
    assert slots.victim(0.0) == ("a", 11)


def test_a_tenant_that_has_its_share_preempts_nobody() -> None:
    slots = slots_with("a" * 5 + "b" * 8 + "c", num_slots=12)
    for stream, tenant in enumerate("aaaabbbbbbbb"):
        slots.begin(tenant, stream, 0.0)
    slots.leave("c")
    assert not slots.is_short(0.0)
    assert slots.victim(0.0) is None


def test_a_tenant_less_than_two_streams_above_its_share_loses_none() -> None:
    slots = slots_with("a" * 6 + "b" * 4)
    fill(slots)
    slots.wait("b", 0.0)
    assert slots.victim(0.0) is None


def test_waiting_requests_leave() -> None:
    slots = slots_with("ab")
    slots.leave("a")
    assert fill(slots) == "b"
    assert repr(slots) == "<DecodeSlots 1 of 10, 0 tenants wait>"


def test_weights_of_deleted_tenants_go() -> None:
    slots = slots_with("ab" * 10)
    slots.set_weight("a", 9.0)
    for _ in range(2):
        slots.forget("a")
    fill(slots)
    assert slots._weights == {}


def test_a_weight_may_be_set_before_its_tenant_comes() -> None:
    slots: DecodeSlots[int] = DecodeSlots(10, 0)
    slots.set_weight("a", 4.0)
    for tenant in "ab" * 10:
        slots.wait(tenant, 0.0)
    order = fill(slots)
    assert (order.count("a"), order.count("b")) == (8, 2)


def test_a_stream_has_one_slot() -> None:
    slots = slots_with("aa")
    slots.begin("a", 7, 0.0)
    with pytest.raises(ValueError, match="a stream of tenant a has a slot already"):
        slots.begin("a", 7, 0.0)
    with pytest.raises(KeyError, match="8"):
        slots.end("a", 8, 0.0)
    slots.check()


@pytest.mark.parametrize("name", ["_filled", "_seen_weight"])
def test_check_finds_a_sum_that_is_wrong(name: str) -> None:
    slots = slots_with("ab")
    slots.check()
    setattr(slots, name, getattr(slots, name) + 0.5)
    with pytest.raises(AssertionError):
        slots.check()


@pytest.mark.parametrize(
    ("num_slots", "num_reserved", "max_reserved"), [(4, 4, None), (4, -1, None), (4, 2, 1), (4, 1, 4)]
)
def test_an_unusable_reserve_is_refused(num_slots: int, num_reserved: int, max_reserved: int | None) -> None:
    with pytest.raises(ValueError, match="in reserve"):
        DecodeSlots(num_slots, num_reserved, max_reserved)


@pytest.mark.parametrize("weight", [-1.0, 0.0, float("inf"), float("nan")])
def test_an_unusable_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=f"tenant a has weight {weight}"):
        slots_with("a").set_weight("a", weight)


TENANTS = st.sampled_from("abc")


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots: DecodeSlots[int] = DecodeSlots(6, 1, 3)
        self.streams: list[tuple[str, int]] = []
        self.waiting: list[str] = []
        self.now_s = 0.0
        self.number = 0

    @rule(tenant=TENANTS)
    def wait(self, tenant: str) -> None:
        self.slots.wait(tenant, self.now_s)
        self.waiting.append(tenant)

    @precondition(lambda self: self.waiting)
    @rule()
    def leave(self) -> None:
        self.slots.leave(self.waiting.pop())

    @rule()
    def begin(self) -> None:
        tenant = self.slots.next_tenant(self.now_s)
        if tenant is None:
            assert not self.waiting or len(self.streams) >= 3  # beside the reserve every slot is given
            return
        self.waiting.remove(tenant)
        self.number += 1
        self.slots.begin(tenant, self.number, self.now_s)
        self.streams.append((tenant, self.number))

    @precondition(lambda self: self.streams)
    @rule()
    def end(self) -> None:
        self.slots.end(*self.streams.pop(0), self.now_s)

    @rule()
    def preempt(self) -> None:
        victim = self.slots.victim(self.now_s)
        if victim is not None:
            assert len(self.streams) == 6
            assert victim in self.streams
            assert sum(tenant == victim[0] for tenant, _ in self.streams) >= 2

    @rule(tenant=TENANTS, weight=st.sampled_from((0.25, 1.0, 4.0)))
    def weigh(self, tenant: str, weight: float) -> None:
        self.slots.set_weight(tenant, weight)

    @rule(elapsed_s=st.sampled_from((1.0, 40.0)))
    def advance(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    @invariant()
    def holds(self) -> None:
        self.slots.check()
        assert self.slots.num_streams == len(self.streams) <= 6


SlotsMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestSlotsMachine = SlotsMachine.TestCase
