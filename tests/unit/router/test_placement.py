"""Round robin, and who may exchange pages with whom."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.base import RequestId
from kvferry.membership.base import MemberId
from kvferry.pages.exchange import ExchangeFields, exchange_digest
from kvferry.router.placement import Candidate, Placement, PlacementRequest, Reason, unpaired, why_unequal
from kvferry.router.placement_policy import RoundRobinPolicy
from support.candidates import candidate


def a_worker(name: str, *, block_size: int = 32, dtype: str = "float32", exchange: ExchangeFields = ()) -> Candidate:
    digest = exchange_digest(exchange) if exchange else ""
    return candidate(
        name, block_size=block_size, kv_cache_dtype=dtype, exchange=exchange, exchange_digest=digest, model="model"
    )


def round_robin(
    prefill: Sequence[Candidate], decode: Sequence[Candidate], policy: RoundRobinPolicy | None = None
) -> Placement | None:
    request = PlacementRequest(RequestId("r"), (), 1, 16, 1)
    return (policy or RoundRobinPolicy()).place(request, prefill, decode, 0.0, volumes={}, may_be_aggregated=True)


def test_nobody_decodes() -> None:
    assert round_robin([a_worker("p")], []) is None


def test_without_a_prefill_worker_the_decode_worker_computes() -> None:
    assert round_robin([], [a_worker("d")]) == Placement(None, MemberId("d"), Reason.NO_PREFILL_WORKER)


def test_both_roles_turn_over() -> None:
    policy = RoundRobinPolicy()
    prefill, decode = [a_worker("p0"), a_worker("p1")], [a_worker("d0"), a_worker("d1"), a_worker("d2")]
    placed = [round_robin(prefill, decode, policy) for _ in range(6)]
    assert [(p.prefill, p.decode) for p in placed if p] == [
        ("p0", "d0"),
        ("p1", "d1"),
        ("p0", "d2"),
        ("p1", "d0"),
        ("p0", "d1"),
        ("p1", "d2"),
    ]


def test_unequal_pages_are_never_exchanged() -> None:
    decode = [a_worker("d")]
    for other in (a_worker("p", block_size=64), a_worker("p", dtype="bfloat16")):
        assert round_robin([other], decode) == Placement(None, MemberId("d"), Reason.UNEQUAL_PAGES)
    mixed = [a_worker("p0", block_size=64), a_worker("p1")]
    assert round_robin(mixed, decode) == Placement(MemberId("p1"), MemberId("d"), Reason.DISAGGREGATED)


SHORT, LONG = (("max_model_len", "4096"), ("weights", "a")), (("max_model_len", "8192"), ("weights", "a"))


def test_equal_shapes_are_not_enough() -> None:
    placement = round_robin([a_worker("p", exchange=SHORT)], [a_worker("d", exchange=LONG)])
    assert placement == Placement(None, MemberId("d"), Reason.UNEQUAL_PAGES)


def test_a_difference_is_named() -> None:
    short, long, silent = (a_worker("w", exchange=fields).member for fields in (SHORT, LONG, ()))
    assert why_unequal(short, long) == "max_model_len is 4096 and 8192"
    assert why_unequal(short, short) == why_unequal(silent, silent) == ""
    assert "does not say" in why_unequal(short, silent)


def test_workers_without_a_partner_are_found() -> None:
    short, long = a_worker("short", exchange=SHORT).member, a_worker("long", exchange=LONG).member
    assert list(unpaired([short], [long])) == [(short, long), (long, short)]
    assert list(unpaired([short, long], [long])) == [(short, long)]
    assert not list(unpaired([short, long], [long, short]))
    assert not list(unpaired([], [long]))
    assert not list(unpaired([short], []))
