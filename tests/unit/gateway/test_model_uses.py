"""Series of models: bounded, whatever comes and goes."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.gateway.usage import tenant_uses
from kvferry.gateway.usage.tenant_uses import ModelUses
from kvferry.gateway.usage.usage_log import UsageRecord
from kvferry.observability.telemetry import MODEL_FIRST_TOKEN, MODEL_READY, MODEL_REQUESTS, MODEL_TOKENS


def note(uses: ModelUses, asked: str, model: str, outcome: str = "ok") -> None:
    uses.note(UsageRecord(0.0, "t", "r", "completions", outcome, 10, 4, 3, 0.1, model), asked, 0.5, None)


def test_requests_count_by_model_that_answered_and_model_that_was_asked() -> None:
    uses = ModelUses(lambda: {"new": True, "old": False})
    for asked, model, outcome in (("old", "old", "ok"), ("old", "new", "ok"), ("new", "new", "failed")):
        note(uses, asked, model, outcome)
    readings = list(uses.readings())
    requests = {each.labels: each.value for each in readings if each.metric is MODEL_REQUESTS and each.value}
    assert requests == {("old", "old", "ok"): 1, ("new", "old", "ok"): 1, ("new", "new", "failed"): 1}
    tokens = {each.labels: each.value for each in readings if each.metric is MODEL_TOKENS}
    assert tokens["new", "prompt"] == 20
    assert tokens["old", "generated"] == 3
    first = {each.labels: (each.value, each.total) for each in readings if each.metric is MODEL_FIRST_TOKEN}
    assert first["new",] == (2, 1.0)
    assert {each.labels[0]: each.value for each in readings if each.metric is MODEL_READY} == {"new": 1, "old": 0}


def test_models_after_many_are_one_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_uses, "MAX_PAIRS", 4)
    uses = ModelUses()
    for i in range(50):
        note(uses, f"m{i}", f"m{i}")
        note(uses, "m0", "m0")
    counts: Counter[str] = Counter()
    for reading in uses.readings():
        if reading.metric is MODEL_REQUESTS:
            counts[reading.labels[0]] += int(reading.value)
    assert counts == {"m0": 51, "m1": 1, "m2": 1, "m3": 1, "other": 46}
