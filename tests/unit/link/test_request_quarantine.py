"""Digests that gateways refuse, and how workers pass them on."""

from __future__ import annotations

import pytest

from kvferry.link.request_quarantine import DIGEST_BYTES, MAX_QUARANTINED, QUARANTINE_S, Quarantine, to_wire
from kvferry.wire.v1 import worker_pb2 as pb


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "little")


def test_an_entry_ends() -> None:
    quarantine = Quarantine()
    assert not quarantine.contains(digest(1), 0.0)
    quarantine.add(digest(1), 0.0)
    assert quarantine.contains(digest(1), QUARANTINE_S - 1)
    quarantine.add(digest(1), 10.0)
    assert quarantine.contains(digest(1), QUARANTINE_S + 1)
    assert not quarantine.contains(digest(1), QUARANTINE_S + 10)
    assert not quarantine.is_empty(10.0)
    assert quarantine.is_empty(QUARANTINE_S + 10)
    assert len(quarantine) == 0


@pytest.mark.parametrize("surplus", [0, 1])
def test_it_has_a_limit(surplus: int) -> None:
    quarantine = Quarantine()
    for i in range(MAX_QUARANTINED + surplus):
        quarantine.add(digest(i), 0.0)
    assert len(quarantine) == MAX_QUARANTINED
    assert quarantine.contains(digest(0), 1.0) == (not surplus)


def test_entries_pass_from_one_to_another_with_the_time_that_is_left() -> None:
    one, other = Quarantine(), Quarantine()
    assert one.to_wire(0.0) is None
    one.add(digest(1), 0.0)
    message = one.to_wire(100.0)
    assert message is not None
    new = other.add_from_wire(message, 5000.0)
    assert new is not None
    assert [(entry.digest, entry.left_ms) for entry in new.requests] == [(digest(1), 200_000)]
    assert other.contains(digest(1), 5000.0 + QUARANTINE_S - 100.1)
    assert not other.contains(digest(1), 5000.0 + QUARANTINE_S - 100)
    last = one.to_wire(QUARANTINE_S - 0.0005)
    assert last is not None
    assert [entry.left_ms for entry in last.requests] == [1], "less than a millisecond is some time, too"
    assert other.add_from_wire(message, 5001.0) is None, "known: it is not passed on again"


def test_a_peer_can_neither_add_more_nor_longer_than_the_limits() -> None:
    quarantine = Quarantine()
    message = to_wire({digest(i): 1e6 for i in range(MAX_QUARANTINED + 5)}, 0.0)
    message.requests.insert(0, pb.QuarantinedRequest(digest=b"short", left_ms=1000))
    quarantine.add_from_wire(message, 0.0)
    assert len(quarantine) == MAX_QUARANTINED - 1
    assert not quarantine.contains(b"short", 0.0)
    assert not quarantine.contains(digest(3), QUARANTINE_S)
