"""What `kvferry status` and `kvferry prove` say of proofs."""

from __future__ import annotations

import pytest

from kvferry import config as configuration
from kvferry.errors import LocalError
from kvferry.membership.base import Member, MemberId, MemberKind, Record
from kvferry.proof.certificates import Certificate, Certificates, Way, kind_of
from kvferry.proof.verdict import Distances, Outcome, View
from kvferry_local.proofs import PENDING, UNDER_WAY, ProofStatus, bars, proofs_of, prove

CONFIG = configuration.parse({})


def member(kind: MemberKind, number: int = 0, *, device: str = "cpu", digest: str = "d", pool: str = "") -> Member:
    return Member(
        kind=kind,
        member_id=MemberId(f"{kind}-{number}"),
        address="",
        model="/models/small",
        version="1",
        device=device,
        exchange_digest=digest,
        pool=pool,
    )


PREFILL, DECODE = member(MemberKind.PREFILL), member(MemberKind.DECODE)
MEASURED = (
    Distances(0, 30, View.DIRECT, 0.0, 0.1, (0.5,)),
    Distances(1, 97, View.HELD, 0.25, 0.1, (1.0, 0.4)),
)


def records(outcome: Outcome, **values: object) -> dict[str, Record]:
    certificate = Certificate(
        prefill=kind_of(PREFILL), decode=kind_of(DECODE), way=Way.TRANSFER, outcome=outcome, **values
    )
    return {certificate.key: Record(Certificates(None).encode(certificate), 7)}


def status(found: dict[str, Record]) -> ProofStatus:
    (only,) = proofs_of(CONFIG, (PREFILL, DECODE, member(MemberKind.GATEWAY)), found)
    return only


def test_each_state_is_told() -> None:
    assert status({}).outcome == PENDING
    assert status(records(Outcome.UNDECIDED, claimed_by="gateway-1")).outcome == UNDER_WAY
    assert status(records(Outcome.PROVEN, claimed_by="gateway-1")).outcome == "proven"
    refuted = status(records(Outcome.REFUTED, reason="pages differ"))
    assert not refuted.is_proven
    assert "pages differ" in refuted.line()


def test_the_largest_distance_is_told_beside_the_smallest_of_wrong_pages() -> None:
    proven = status(records(Outcome.PROVEN, distances=MEASURED))
    assert (proven.distance, proven.wrong_from) == (0.25, 0.4)
    assert "0.25" in proven.line()
    assert "0.4" in proven.line()


def test_the_bars_are_as_long_as_the_distances() -> None:
    lengths = [line.count("#") for line in bars(status(records(Outcome.PROVEN, distances=MEASURED)))]
    assert lengths == [0, 2, 12, 6, 2, 24, 10]


def test_there_is_one_for_each_kind_of_engine_and_none_for_engines_that_exchange_nothing() -> None:
    workers = [
        *(member(MemberKind.PREFILL, number) for number in range(3)),
        *(member(MemberKind.DECODE, number) for number in range(2)),
        member(MemberKind.DECODE, 2, device="gpu"),
        member(MemberKind.DECODE, 3, digest="other"),
        member(MemberKind.DECODE, 4, pool="other"),
    ]
    assert [each.decode_device for each in proofs_of(CONFIG, workers, {})] == ["cpu", "gpu"]


def test_a_record_that_cannot_be_read_counts_as_none() -> None:
    (key,) = records(Outcome.PROVEN)
    assert status({key: Record(b"{", 1)}).outcome == PENDING


@pytest.mark.parametrize("settings", [{"engine": {"kind": "sim"}}, {"engine": {"proof": "off"}}])
async def test_where_nothing_is_proven_the_command_says_so(settings: dict[str, object]) -> None:
    config = configuration.parse(settings)
    assert proofs_of(config, (PREFILL, DECODE), records(Outcome.PROVEN)) == ()
    with pytest.raises(LocalError):
        await prove(config, again=False, timeout_s=1.0)
