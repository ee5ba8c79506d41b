"""Results of proofs as records and files."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.proof.certificates import (
    AGAIN_S,
    MAX_LOST,
    MAX_REASON_CHARS,
    MAX_RECORD_BYTES,
    Certificate,
    Certificates,
    EngineKind,
    Way,
    can_transfer,
    key_of,
    kind_of,
)
from kvferry.proof.verdict import FARTHEST, Distances, Outcome, View

SECRET = b"a secret of all gateways, 32 bytes"
PREFILL, DECODE = EngineKind("e" * 32, "a device", "1.0"), EngineKind("e" * 32, "another device", "1.0")


def a_certificate(**values: Any) -> Certificate:
    known: dict[str, Any] = {
        "prefill": PREFILL,
        "decode": DECODE,
        "way": Way.TRANSFER,
        "outcome": Outcome.PROVEN,
        "model": "m",
        "gateway": "gateway-1",
        "unix_s": 1000.5,
        "took_s": 2.0,
        "limits": {"direct": 0.001, "held": FARTHEST},
        "distances": (
            Distances(0, 14, View.DIRECT, 0.0, 0.1, (5.0, 4.0)),
            Distances(1, 56, View.HELD, 0.2, FARTHEST, (3.5, FARTHEST)),
        ),
    }
    return Certificate(**{**known, **values})


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_a_record_says_what_was_written(secret: bytes) -> None:
    certificates, certificate = Certificates(None, secret), a_certificate(reason="why", num_lost=1, claimed_by="g")
    read = certificates.decode(certificate.key, certificates.encode(certificate))
    assert read == certificate
    assert bool(msgspec.json.decode(certificates.encode(certificate))["signature"]) is bool(secret)
    assert certificates.encode(read) == certificates.encode(certificate), "as often as it is written"
    assert (read.distance, read.wrong_from) == (0.2, 3.5)
    assert (a_certificate(distances=()).distance, a_certificate(distances=()).wrong_from) == (None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("outcome", "proven"),
        ("unix_s", 2e9),
        ("num_lost", 0),
        ("claimed_by", "me"),
        ("limits", {"direct": 9.0}),
    ],
)
def test_a_record_that_was_changed_is_passed_over(field: str, value: object) -> None:
    certificates, certificate = Certificates(None, SECRET), a_certificate(outcome=Outcome.REFUTED, num_lost=2)
    record = msgspec.json.decode(certificates.encode(certificate))
    assert record["certificate"][field] != value
    record["certificate"][field] = value
    assert certificates.decode(certificate.key, msgspec.json.encode(record)) is None


@pytest.mark.parametrize("signature", ["", "0" * 64, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 64])
def test_a_record_of_another_signature_is_passed_over(signature: str) -> None:
    certificates, certificate = Certificates(None, SECRET), a_certificate()
    record = msgspec.json.decode(certificates.encode(certificate))
    assert certificates.decode(certificate.key, msgspec.json.encode(record)) == certificate
    record["signature"] = signature
    assert certificates.decode(certificate.key, msgspec.json.encode(record)) is None


def test_a_signed_record_of_a_later_release_with_more_fields_is_read() -> None:
    certificates, certificate = Certificates(None, SECRET), a_certificate()
    fields = msgspec.json.decode(msgspec.json.encode(certificate)) | {"more": 1}
    value = msgspec.json.encode(fields)
    record = {"certificate": fields, "signature": certificates._signature(value)}
    assert certificates.decode(certificate.key, msgspec.json.encode(record)) == certificate


def test_a_record_of_another_secret_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    certificate = a_certificate()
    values = {secret: Certificates(None, secret).encode(certificate) for secret in (b"", SECRET, SECRET[::-1])}
    for reader in values:
        for writer, value in values.items():
            read = Certificates(None, reader).decode(certificate.key, value)
            assert (read is not None) is (reader == writer)
    assert all("signature" in record.getMessage() for record in caplog.records)
    assert not any(secret.decode() in caplog.text for secret in (SECRET, SECRET[::-1]))


def test_the_limit_of_a_record() -> None:
    certificates, certificate = Certificates(None, SECRET), a_certificate()
    value = certificates.encode(certificate)
    at_limit = value + b" " * (MAX_RECORD_BYTES - len(value))
    assert certificates.decode(certificate.key, at_limit) is not None
    assert certificates.decode(certificate.key, at_limit + b" ") is None


@pytest.mark.parametrize("value", [b"", b"{}", b"null", b"{", b"\xff\xfe", b"[" * 60_000, b'{"prefill": 1}'])
def test_an_unreadable_record_is_passed_over_and_said(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert Certificates(None).decode("0" * 32, value) is None
    assert "passed over" in caplog.text


def test_a_record_under_the_name_of_other_engines_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    certificates, certificate = Certificates(None, SECRET), a_certificate()
    other = key_of(DECODE, PREFILL, Way.TRANSFER)
    assert certificates.decode(other, certificates.encode(certificate)) is None
    assert f"the proof {other!r} is passed over: it is of other engines than its name says" in caplog.text


def test_a_long_reason_is_cut_and_signed_as_it_is_written() -> None:
    certificates, certificate = Certificates(None, SECRET), a_certificate(reason="x" * 10_000)
    read = certificates.decode(certificate.key, certificates.encode(certificate))
    assert read is not None
    assert read.reason == "x" * MAX_REASON_CHARS


# Keys


def a_worker(**values: Any) -> Member:
    known = {"kind": MemberKind.DECODE, "member_id": MemberId("w"), "address": "a:1", "model": "m", "version": "1"}
    return Member(**{**known, "exchange_digest": "e", "block_size": 1, **values})


@pytest.mark.parametrize(
    ("prefill", "decode", "can"),
    [
        ({}, {}, True),
        ({"pool": "p"}, {"pool": "p"}, True),
        ({"pool": "p"}, {}, False),
        ({}, {"exchange_digest": "f"}, False),
        ({"exchange_digest": ""}, {"exchange_digest": ""}, False),
        ({"block_size": 0}, {"block_size": 0}, False),
        ({"device": "a device"}, {"device": "another device"}, True),
    ],
)
def test_pages_can_go_between_workers_of_a_pool_whose_bytes_mean_the_same(
    prefill: dict[str, Any], decode: dict[str, Any], can: bool
) -> None:
    assert can_transfer(a_worker(**prefill), a_worker(**decode)) is can


def test_the_key_is_of_every_part() -> None:
    changed = [
        *(PREFILL._replace(**{field: "other"}) for field in EngineKind._fields),
    ]
    keys = {
        key_of(PREFILL, DECODE, Way.TRANSFER),
        key_of(DECODE, PREFILL, Way.TRANSFER),
        key_of(PREFILL, DECODE, Way.ADAPTER),
        *(key_of(kind, DECODE, Way.TRANSFER) for kind in changed),
        *(key_of(PREFILL, kind, Way.TRANSFER) for kind in changed),
        # Where one part ends and the next begins counts.
        key_of(EngineKind("a", "bc", "d"), DECODE, Way.TRANSFER),
        key_of(EngineKind("ab", "c", "d"), DECODE, Way.TRANSFER),
    }
    assert len(keys) == 3 + 2 * 3 + 2
    assert a_certificate().key in keys


def test_the_kind_of_a_member_is_what_decides_its_pages() -> None:
    member = Member(
        kind=MemberKind.DECODE,
        member_id=MemberId("d"),
        address="a:1",
        model="m",
        version="1.0",
        device="a device",
        exchange_digest="e" * 32,
    )
    assert kind_of(member) == PREFILL
    assert kind_of(structs.replace(member, member_id=MemberId("e"), address="b:2", node="n", pid=7)) == PREFILL


# Times


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_result_is_due_after_its_time_and_when_a_clock_goes_back(outcome: Outcome) -> None:
    result, again_s = a_certificate(outcome=outcome, unix_s=5e6), AGAIN_S[outcome]
    assert not result.is_due(5e6)
    assert not result.is_due(5e6 + again_s - 1)
    assert result.is_due(5e6 + again_s)
    assert not result.is_due(5e6 - 1), "the clock of another gateway may be late"
    assert result.is_due(5e6 - again_s), "it would hold for ever"


def test_results_hold_for_longer_the_more_they_say() -> None:
    assert AGAIN_S[Outcome.UNDECIDED] < AGAIN_S[Outcome.REFUTED] < AGAIN_S[Outcome.PROVEN]


@pytest.mark.parametrize("unix_s", [0.0, 5e6, 9e9])
def test_what_ends_engines_is_never_due_again(unix_s: float) -> None:
    lost = a_certificate(outcome=Outcome.REFUTED, unix_s=unix_s, num_lost=MAX_LOST)
    assert lost.is_final
    assert not lost.is_due(5e6 + 1e9)
    assert not structs.replace(lost, num_lost=MAX_LOST - 1).is_final


# Files


def test_a_result_is_kept_and_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "proofs"
    certificates, certificate = Certificates(folder, SECRET), a_certificate()
    assert certificates.load(certificate.key) is None
    certificates.drop(certificate.key)
    certificates.keep(a_certificate(unix_s=1.0))
    certificates.keep(certificate)
    assert Certificates(folder, SECRET).load(certificate.key) == certificate
    assert [file.name for file in folder.iterdir()] == [f"{certificate.key}.json"], "nothing partial stays"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / f"{certificate.key}.json").stat().st_mode & 0o777 == 0o600
    assert certificates.load(key_of(DECODE, PREFILL, Way.TRANSFER)) is None
    assert Certificates(folder).load(certificate.key) is None
    certificates.drop(certificate.key)
    certificates.drop(certificate.key)
    assert certificates.load(certificate.key) is None


@pytest.mark.parametrize("outcome", list(Outcome))
def test_what_is_undecided_is_not_kept_and_what_was_before_is_forgotten(
    tmp_path: Path, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    certificates, certificate = Certificates(tmp_path), a_certificate(outcome=outcome)
    certificates.keep(certificate)
    certificates.keep(a_certificate())
    certificates.keep(certificate)
    assert certificates.load(certificate.key) == (certificate if outcome is not Outcome.UNDECIDED else None)
    assert not caplog.records


@pytest.mark.parametrize(("mode", "is_read"), [(0o600, True), (0o644, True), (0o620, False), (0o602, False)])
def test_a_file_that_others_can_write_is_passed_over(tmp_path: Path, mode: int, is_read: bool) -> None:
    certificates, certificate = Certificates(tmp_path), a_certificate()
    certificates.keep(certificate)
    (tmp_path / f"{certificate.key}.json").chmod(mode)
    assert (certificates.load(certificate.key) is not None) is is_read


def test_a_file_of_another_user_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates, certificate = Certificates(tmp_path), a_certificate()
    certificates.keep(certificate)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert certificates.load(certificate.key) is None


def test_a_file_that_is_too_long_unreadable_or_no_file_is_passed_over(tmp_path: Path) -> None:
    certificates, certificate = Certificates(tmp_path), a_certificate()
    file = tmp_path / f"{certificate.key}.json"
    value = certificates.encode(certificate)
    for content in (b"{", value + b" " * MAX_RECORD_BYTES):
        file.write_bytes(content)
        assert certificates.load(certificate.key) is None
    file.unlink()
    file.mkdir()
    assert certificates.load(certificate.key) is None


def test_without_a_folder_nothing_is_kept_and_an_unusable_one_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = a_certificate()
    nowhere = Certificates(None)
    nowhere.keep(certificate)
    assert nowhere.load(certificate.key) is None
    nowhere.drop(certificate.key)
    assert not caplog.records
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        Certificates(tmp_path / "file" / "proofs").keep(certificate)
    assert "not kept" in caplog.text
