from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from kvferry.proof.certificates import (
    AGAIN_S,
    MAX_LOST,
    MAX_REASON_CHARS,
    MAX_RECORD_BYTES,
    Certificate,
    Certificates,
    EngineKind,
    Way,
    key_of,
)
from kvferry.proof.verdict import Distances, Outcome, View

KIND = EngineKind("digest", "device", "1")
CERTIFICATE = Certificate(
    prefill=KIND,
    decode=EngineKind("digest", "another device", "1"),
    way=Way.TRANSFER,
    outcome=Outcome.PROVEN,
    unix_s=1000.0,
    limits={"held": 0.001},
    distances=(Distances(0, 30, View.DIRECT, 0.25, 0.1, (0.5, 0.4)),),
)
SECRET = b"s" * 32


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_a_certificate_is_read_as_it_was_written(secret: bytes) -> None:
    certificates = Certificates(None, secret)
    read = certificates.decode(CERTIFICATE.key, certificates.encode(CERTIFICATE))
    assert read is not None
    assert structs.replace(read, signature="") == CERTIFICATE
    assert bool(read.signature) == bool(secret)


def test_a_certificate_of_another_secret_or_of_none_is_passed_over() -> None:
    certificates = Certificates(None, SECRET)
    for other in (b"", b"t" * 32):
        assert certificates.decode(CERTIFICATE.key, Certificates(None, other).encode(CERTIFICATE)) is None
        assert Certificates(None, other).decode(CERTIFICATE.key, certificates.encode(CERTIFICATE)) is None


def test_a_changed_field_breaks_the_signature() -> None:
    certificates = Certificates(None, SECRET)
    signed = msgspec.json.decode(
        certificates.encode(structs.replace(CERTIFICATE, outcome=Outcome.REFUTED)), type=Certificate
    )
    forged = msgspec.json.encode(structs.replace(signed, outcome=Outcome.PROVEN))
    assert certificates.decode(CERTIFICATE.key, forged) is None


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"way": "transfer"}'])
def test_a_record_that_cannot_be_read_is_passed_over(value: bytes) -> None:
    assert Certificates(None).decode(CERTIFICATE.key, value) is None


def test_a_record_of_other_engines_is_passed_over() -> None:
    certificates = Certificates(None)
    assert certificates.decode("0" * 32, certificates.encode(CERTIFICATE)) is None


def test_a_record_has_a_largest_size() -> None:
    certificates = Certificates(None)
    value = certificates.encode(CERTIFICATE)
    assert certificates.decode(CERTIFICATE.key, value.ljust(MAX_RECORD_BYTES)) is not None
    assert certificates.decode(CERTIFICATE.key, value.ljust(MAX_RECORD_BYTES + 1)) is None


def test_a_reason_has_a_longest_length() -> None:
    certificates = Certificates(None)
    written = certificates.encode(structs.replace(CERTIFICATE, reason="x" * 10_000))
    read = certificates.decode(CERTIFICATE.key, written)
    assert read is not None
    assert len(read.reason) == MAX_REASON_CHARS


def test_what_is_kept_is_there_for_later_clusters_until_it_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "proofs"
    Certificates(folder).keep(CERTIFICATE)
    assert Certificates(folder).load(CERTIFICATE.key) == CERTIFICATE
    assert (folder.stat().st_mode & 0o777, len(list(folder.iterdir()))) == (0o700, 1)
    Certificates(folder).drop(CERTIFICATE.key)
    Certificates(folder).drop(CERTIFICATE.key)
    assert Certificates(folder).load(CERTIFICATE.key) is None
    Certificates(None).keep(CERTIFICATE)
    assert Certificates(None).load(CERTIFICATE.key) is None


def test_what_is_undecided_is_not_kept(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.keep(structs.replace(CERTIFICATE, outcome=Outcome.UNDECIDED))
    assert certificates.load(CERTIFICATE.key) is None
    certificates.keep(structs.replace(CERTIFICATE, outcome=Outcome.REFUTED))
    assert certificates.load(CERTIFICATE.key) is not None


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_passed_over(tmp_path: Path, mode: int) -> None:
    certificates = Certificates(tmp_path)
    certificates.keep(CERTIFICATE)
    (file,) = tmp_path.iterdir()
    file.chmod(mode)
    assert certificates.load(CERTIFICATE.key) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_passed_over(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.keep(CERTIFICATE)
    (file,) = tmp_path.iterdir()
    os.chown(file, 65534, 65534)
    assert certificates.load(CERTIFICATE.key) is None


def test_a_folder_that_cannot_be_used_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    certificates = Certificates(tmp_path / "file")
    certificates.keep(CERTIFICATE)
    assert certificates.load(CERTIFICATE.key) is None


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_result_is_proven_again_after_a_time(outcome: Outcome) -> None:
    result = structs.replace(CERTIFICATE, outcome=outcome)
    assert not result.is_due(1000.0)
    assert not result.is_due(1000.0 + AGAIN_S[outcome] - 1)
    assert result.is_due(1000.0 + AGAIN_S[outcome])
    assert result.is_due(999.0), "its clock, or this one, was wrong"


def test_what_ended_engines_is_not_proven_again_by_itself() -> None:
    once, twice = (structs.replace(CERTIFICATE, outcome=Outcome.REFUTED, num_lost=MAX_LOST - less) for less in (1, 0))
    assert once.is_due(1e12)
    assert not twice.is_due(1e12)


def test_each_part_of_a_kind_decides_the_key() -> None:
    others = {
        EngineKind("other", "device", "1"),
        EngineKind("digest", "other", "1"),
        EngineKind("digest", "device", "2"),
    }
    pairs = [(KIND, KIND), *((KIND, other) for other in others), *((other, KIND) for other in others)]
    assert len({key_of(*pair, way) for pair in pairs for way in Way}) == len(pairs) * len(Way)


def test_distances_are_summed_up() -> None:
    assert (CERTIFICATE.distance, CERTIFICATE.wrong_from) == (0.25, 0.4)
    nothing = structs.replace(CERTIFICATE, distances=())
    assert (nothing.distance, nothing.wrong_from) == (None, None)
