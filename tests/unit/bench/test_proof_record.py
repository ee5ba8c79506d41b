"""The record of proofs is what real engines ended with, for every kind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import structs

from bench import proof_record
from bench.proof_models import KINDS
from bench.proof_record import PAGE, Row, read, record, row_of, with_record
from kvferry.proof.verdict import Distances, Outcome, Verdict, View


def test_the_page_has_what_was_recorded() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_record(page, read())


def test_every_kind_has_a_row() -> None:
    rows = read()
    assert {row.kind for row in rows} == set(KINDS)
    assert len({row.key for row in rows}) == len(rows)
    assert all((row.outcome == Outcome.PROVEN) != bool(row.reason) for row in rows)


def test_a_row_has_what_was_measured() -> None:
    measured = [
        Distances(0, 30, View.DIRECT, 0.0, 0.1, (0.5, 0.3)),
        Distances(1, 161, View.HELD, 0.2, 0.1, (4.0, 0.9)),
    ]
    row = row_of("llama", "a device", "0.32.0", "float32", Verdict(Outcome.REFUTED, "far"), measured)
    assert row == Row("llama", "a device", "0.32.0", "float32", "refuted", "far", 0.2, 0.3)
    nothing = row_of("llama", "a device", "0.32.0", "float32", Verdict(Outcome.UNDECIDED, "it died"), [])
    assert (nothing.distance, nothing.wrong_from) == (None, None)


def test_a_row_replaces_that_of_the_same_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEEN", "PAGE"):
        copy = tmp_path / getattr(proof_record, name).name
        shutil.copy(getattr(proof_record, name), copy)
        monkeypatch.setattr(proof_record, name, copy)
    before = read()
    changed = structs.replace(before[0], distance=0.25)
    added = structs.replace(before[-1], device="another device")
    record([changed, added])
    after = read()
    assert after[0] == changed
    assert len(after) == len(before) + 1
    assert set(before[1:]) | {changed, added} == set(after)
    assert f"another device, {added.vllm}" in proof_record.PAGE.read_text(encoding="utf-8")
