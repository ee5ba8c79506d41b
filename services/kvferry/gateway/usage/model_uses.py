"""What each model answered, for metrics. They tell whether a canary is as good as the model before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvferry.gateway.usage.tenant_uses import TenantUse
from kvferry.gateway.usage.usage_log import UsageRecord
from kvferry.observability import telemetry
from kvferry.observability.exposition import Reading
from kvferry.observability.telemetry import TENANT_OUTCOMES, TENANT_TOKEN_KINDS
from kvferry.tenancy.pages.outcome import OTHER

# Pairs of a model that was asked and one that answered: models come and go while a gateway serves.
MAX_PAIRS: Final = 256


class ModelUses:
    def __init__(self) -> None:
        self.read_ready: Callable[[], Mapping[str, bool]] = dict
        self._by_pair: dict[tuple[str, ...], TenantUse] = {}

    def note(self, record: UsageRecord, asked: str, first_token_s: float | None, gap_s: float | None) -> None:
        self._use_of(asked, record.model).add(record, first_token_s, gap_s)

    def _use_of(self, *pair: str) -> TenantUse:
        use = self._by_pair.get(pair)
        if use is None:
            use = self._by_pair.setdefault(pair if len(self._by_pair) < MAX_PAIRS else (OTHER, OTHER), TenantUse())
        return use

    def readings(self) -> Iterator[Reading]:
        ready = self.read_ready()
        for model in ready:
            self._use_of(model, model)  # there before its first request
        by_model: dict[str, TenantUse] = defaultdict(TenantUse)
        for (asked, model), use in self._by_pair.items():
            for outcome, count in zip(TENANT_OUTCOMES, use.requests, strict=True):
                yield Reading(telemetry.MODEL_REQUESTS, (model, asked, outcome), count)
            by_model[model].add_all(use)
        for model, use in by_model.items():
            for kind, count in zip(TENANT_TOKEN_KINDS, use.tokens, strict=True):
                yield Reading(telemetry.MODEL_TOKENS, (model, kind), count)
            yield Reading(telemetry.MODEL_FIRST_TOKEN, (model,), use.first_tokens, use.first_tokens_s)
            yield Reading(telemetry.MODEL_TOKEN_GAP, (model,), use.gaps, use.gaps_s)
        for model, is_ready in ready.items():
            yield Reading(telemetry.MODEL_READY, (model,), float(is_ready))
