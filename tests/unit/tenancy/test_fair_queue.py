from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvferry.tenancy.shares.fair_queue import FairQueue, QueueLimit, QueueParameters
from kvferry.tenancy.shares.tenant_queue import Slice

SMALL = QueueParameters(turn_ms=100.0, slice_ms=50.0, depth_ms=60.0)


@dataclass(eq=False)
class Prompt:
    tenant: str
    cost_ms: float = 50.0
    prefix: int = 0


def queue_of(*prompts: Prompt, parameters: QueueParameters = SMALL) -> FairQueue[Prompt]:
    queue: FairQueue[Prompt] = FairQueue(parameters)
    for prompt in prompts:
        assert queue.add(prompt, 0.0) is None
    return queue


def serve(
    queue: FairQueue[Prompt], num_slices: int = 1, *, now_s: float = 0.0, scale: float = 1.0
) -> list[Slice[Prompt]]:
    """Serve slices one at a time, each measured at `scale` times its estimate."""
    served: list[Slice[Prompt]] = []
    while len(served) < num_slices:
        piece = queue.next_slice()
        assert piece is not None
        queue.measured(piece, piece.ms * scale, now_s)
        served.append(piece)
        queue.check()
    return served


def tenants(pieces: list[Slice[Prompt]]) -> str:
    return "".join(piece.tenant for piece in pieces)


def test_equal_tenants_take_turns() -> None:
    queue = queue_of(*[Prompt("a") for _ in range(6)], *[Prompt("b") for _ in range(6)])
    assert tenants(serve(queue, 8)) == "aabbaabb"


def test_shares_follow_weights() -> None:
    queue = queue_of(*[Prompt("a") for _ in range(99)], *[Prompt("b") for _ in range(99)])
    queue.set_weight("a", 4.0)
    assert tenants(serve(queue, 50)).count("a") == 40


def test_measured_work_is_charged_and_not_the_estimate() -> None:
    # The estimates of both tenants are equal; a prompt of `a` takes four times as long.
    queue = queue_of(*[Prompt("a") for _ in range(200)], *[Prompt("b") for _ in range(200)])
    for _ in range(200):
        [piece] = [queue.next_slice()]
        assert piece is not None
        queue.measured(piece, 80.0 if piece.tenant == "a" else 20.0, 0.0)
    assert queue.served_ms["a"] == pytest.approx(queue.served_ms["b"], abs=2 * (100 + 80))


def test_a_long_prompt_is_given_in_slices_and_goes_on_before_others_of_its_tenant() -> None:
    long, short = Prompt("a", 120.0), Prompt("a", 10.0)
    queue = queue_of(long, short)
    served = serve(queue, 4)
    assert [(piece.request, piece.ms, piece.is_last) for piece in served] == [
        (long, 50.0, False),
        (long, 50.0, False),
        (long, 20.0, True),
        (short, 10.0, True),
    ]


def test_the_engine_is_kept_as_deep_as_it_was_asked_for() -> None:
    queue = queue_of(*[Prompt("a") for _ in range(9)])
    first, second = queue.next_slice(), queue.next_slice()
    assert first is not None
    assert second is not None  # 50 ms inside are less than 60
    assert queue.next_slice() is None
    queue.measured(first, 50.0, 0.0)
    assert queue.inside_ms == 50.0
    assert queue.next_slice() is not None


def test_a_tenant_that_comes_back_below_the_running_one_ends_its_turn() -> None:
    queue = queue_of(*[Prompt("a") for _ in range(9)])
    serve(queue, 1)
    queue.add(Prompt("b"), 0.0)
    assert tenants(serve(queue, 2)) == "ba"


def test_a_tenant_that_was_away_gets_no_more_than_its_share() -> None:
    queue = queue_of(*[Prompt("a") for _ in range(99)])
    serve(queue, 40)
    for _ in range(40):
        queue.add(Prompt("b"), 0.0)
    assert 9 <= tenants(serve(queue, 20)).count("b") <= 12


def test_a_tenant_cannot_lower_its_charge_by_leaving_for_a_moment() -> None:
    queue = queue_of(Prompt("a", 50.0), *[Prompt("b") for _ in range(99)])
    for _ in range(30):
        queue.add(Prompt("a", 50.0), 0.0)
        serve(queue, 2)
    assert queue.served_ms["a"] <= queue.served_ms["b"] + 2 * 150


def test_lags_are_forgiven_after_a_second_without_work_and_not_before() -> None:
    for idle_s, first in ((0.9, "b"), (1.0, "a")):
        queue = queue_of(Prompt("a", 40.0), Prompt("b", 10.0))
        serve(queue, 2, now_s=5.0)
        queue.add(Prompt("a"), 5.0 + idle_s)
        queue.add(Prompt("b"), 5.0 + idle_s)
        assert tenants(serve(queue, 1)) == first


def test_nothing_is_forgiven_while_a_slice_is_inside() -> None:
    queue = queue_of(Prompt("a", 40.0), Prompt("b", 10.0))
    pieces = [queue.next_slice(), queue.next_slice()]
    assert all(pieces)
    queue.add(Prompt("a"), 99.0)
    queue.add(Prompt("b"), 99.0)
    for piece in pieces:
        assert piece is not None
        queue.measured(piece, piece.ms, 99.0)
    assert tenants(serve(queue, 1)) == "b"


def test_a_continuation_goes_before_new_requests_of_its_own_tenant_only() -> None:
    queue = queue_of(Prompt("a"), Prompt("a"), Prompt("b"))
    first, second = Prompt("b"), Prompt("b")
    queue.add(first, 0.0, is_continued=True)
    queue.add(second, 0.0, is_continued=True)
    served = serve(queue, 4)
    assert tenants(served) == "aabb"
    assert [piece.request for piece in served[2:]] == [first, second]


def test_a_cancelled_request_leaves_and_is_not_charged() -> None:
    gone = Prompt("a", 500.0)
    queue = queue_of(gone, Prompt("b"))
    [piece] = serve(queue, 1)
    assert piece.request is gone
    assert queue.cancel(gone, 0.0)
    assert not queue.cancel(gone, 0.0)
    queue.check()
    assert queue.served_ms == {"a": 50.0}
    assert tenants(serve(queue, 1)) == "b"
    assert queue.next_slice() is None


def test_a_request_may_leave_while_its_slice_is_inside() -> None:
    prompt = Prompt("a", 500.0)
    queue = queue_of(prompt)
    piece = queue.next_slice()
    assert piece is not None
    assert queue.cancel(prompt, 0.0)
    queue.measured(piece, 30.0, 0.0)
    queue.check()
    assert queue.served_ms == {"a": 30.0}
    with pytest.raises(ValueError, match="not inside"):
        queue.measured(piece, 30.0, 0.0)


def test_a_changed_weight_counts_from_then_on() -> None:
    queue = queue_of(*[Prompt("a") for _ in range(400)], *[Prompt("b") for _ in range(400)])
    queue.set_weight("a", 4.0)
    serve(queue, 100)
    queue.set_weight("a", 1.0)
    queue.set_weight("b", 4.0)
    assert 8 <= tenants(serve(queue, 50)).count("a") <= 13
    with pytest.raises(ValueError, match="weight 0"):
        queue.set_weight("a", 0.0)


def test_limits_are_named() -> None:
    parameters = QueueParameters(max_tenants=2, max_requests=8)
    queue = queue_of(*[Prompt("a") for _ in range(4)], parameters=parameters)
    # As many as there is room left for: one tenant does not fill the queue.
    assert queue.add(Prompt("a"), 0.0) is QueueLimit.TENANT_REQUESTS
    assert queue.add(Prompt("b"), 0.0) is None
    assert queue.add(Prompt("c"), 0.0) is QueueLimit.TENANTS
    for _ in range(3):
        assert queue.add(Prompt("b"), 0.0, is_continued=True) is None
    assert queue.add(Prompt("b"), 0.0) is QueueLimit.REQUESTS
    assert queue.add(Prompt("b"), 0.0, is_continued=True) is None
    queue.check()


def test_tenants_that_left_do_not_keep_others_out() -> None:
    queue = queue_of(parameters=QueueParameters(max_tenants=10))
    for number in range(100):
        assert queue.add(Prompt(f"t{number}"), 0.0) is None
        serve(queue, 1)
    assert len(queue._tenants) <= 10


def test_tenants_without_requests_are_forgotten_once_they_are_caught_up_with() -> None:
    queue = queue_of(*[Prompt("a", 10.0) for _ in range(10)])
    for number in range(50):
        queue.add(Prompt(f"t{number}", 10.0), 0.0)
    serve(queue, 60)
    queue.add(Prompt("z"), 2.0)
    assert queue._tenants.keys() == {"z"}


def test_unusable_estimates_and_times_are_refused() -> None:
    queue = queue_of()
    for cost_ms in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="estimated"):
            queue.add(Prompt("a", cost_ms), 0.0)
    prompt = Prompt("a")
    queue.add(prompt, 0.0)
    with pytest.raises(ValueError, match="twice"):
        queue.add(prompt, 0.0)
    piece = queue.next_slice()
    assert piece is not None
    with pytest.raises(ValueError, match="measured"):
        queue.measured(piece, float("nan"), 0.0)
    queue.check()


def test_usage_and_weights_of_deleted_tenants_go() -> None:
    queue = queue_of(Prompt("a"))
    queue.set_weight("a", 3.0)
    serve(queue, 1)
    queue.forget("a")
    assert not queue.served_ms
    queue.add(Prompt("a"), 5.0)
    assert queue.backlogs() == {"a": (50.0, 1.0)}


def test_its_state_can_be_read() -> None:
    queue = queue_of(Prompt("a", 120.0), Prompt("b"))
    assert repr(queue) == "<FairQueue 2 of 2 tenants, turn none, 0 inside>"
    queue.next_slice()
    assert repr(queue) == "<FairQueue 2 of 2 tenants, turn a 50 ms, 1 inside>"


def test_10_000_tenants_are_picked_without_looking_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tenants = 10_000
    queue = queue_of(parameters=QueueParameters(turn_ms=1.0, slice_ms=50.0, depth_ms=1.0))
    for number in range(2 * num_tenants):
        queue.add(Prompt(f"t{number % num_tenants}", 10.0), 0.0)
    num_compared = 0

    class Counted(float):
        def __lt__(self, other: float) -> bool:
            nonlocal num_compared
            num_compared += 1
            return float.__lt__(self, other)

    for tenant in queue._tenants.values():
        tenant.virtual_ms = Counted(tenant.virtual_ms)
        queue._waiting.put(tenant.name, tenant.virtual_ms)
    num_compared = 0
    for _ in range(1000):
        piece = queue.next_slice()
        assert piece is not None
        queue.measured(piece, 10.0, 0.0)
    assert num_compared < 1000 * 60  # of 14 levels, two children each
    queue.check()


def test_silence_about_a_tenant_is_no_word_of_it() -> None:
    """Reports name some of many tenants: those that are left out got something, or nothing, elsewhere."""
    queue = queue_of()
    for name in ("a", "b", "c"):
        queue.add(Prompt(name, 1000.0), 0.0)
    queue.elsewhere({"a": 1e6, "b": 0.0}, 2, 0.0)
    assert queue.debts.factor("a") > 1 > queue.debts.factor("b")
    assert queue.debts.factor("c") == 1.0


def test_debts_end_also_where_no_worker_tells_any_more() -> None:
    queue = queue_of()
    for name in ("a", "b"):
        queue.add(Prompt(name, 1e6), 0.0)
    queue.elsewhere({"a": 1e6, "b": 0.0}, 2, 0.0)
    assert queue.debts.factor("a") > 1
    piece = queue.next_slice()
    assert piece is not None
    queue.measured(piece, piece.ms, 300.0)
    assert queue.debts.factor("a") == 1.0


ORDERED = QueueParameters(turn_ms=200.0, slice_ms=1e9, depth_ms=30.0, is_ordered=True)


def inside(queue: FairQueue[Prompt], done_ms: float = 0.0) -> list[Slice[Prompt]]:
    pieces = []
    while (piece := queue.next_slice(done_ms)) is not None:
        pieces.append(piece)
        queue.check()
    return pieces


def test_a_prompt_that_is_due_before_what_is_inside_follows_at_once() -> None:
    queue = queue_of(*[Prompt("noise") for _ in range(9)], parameters=ORDERED)
    queue.set_weight("gold", 4.0)
    assert [piece.due_ms for piece in inside(queue)] == [50.0]
    assert queue.add(Prompt("gold"), 0.0) is None
    assert queue.add(Prompt("gold"), 0.0) is None
    (gold,) = inside(queue)
    assert (gold.tenant, gold.due_ms) == ("gold", 12.5)
    assert inside(queue) == [], "the second one is due before noise's, and waits for the first"
    queue.measured(gold, 50.0, 0.0)
    assert [piece.tenant for piece in inside(queue)] == ["gold"]


def test_a_prompt_that_is_due_later_waits_until_little_is_left_before_it() -> None:
    queue = queue_of(Prompt("long", 500.0), Prompt("short", 5.0), Prompt("longer", 900.0), parameters=ORDERED)
    assert tenants(inside(queue)) == "longshort"
    assert tenants(inside(queue, done_ms=474.0)) == ""
    assert tenants(inside(queue, done_ms=476.0)) == "longer"


def test_what_is_inside_has_a_bound_whatever_comes() -> None:
    queue = queue_of(Prompt("noise", 1000.0), parameters=ORDERED)
    num_inside = len(inside(queue))
    for number in range(500):
        assert queue.add(Prompt(f"small{number}", 5.0), 0.0) is None
        num_inside += len(inside(queue))
    assert queue.inside_ms <= 1000.0 + 30.0 + 5.0
    assert num_inside <= 8
