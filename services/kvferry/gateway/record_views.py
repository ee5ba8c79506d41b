"""Shows a request's record: all of it to operators; to tenants no worker's name and no figure of others' load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import structs

from kvferry.config import entry_of
from kvferry.router.placement_policy import explain
from kvferry.router.request import RequestRecord

HIDDEN: Final = "hidden"  # there is a value, for operators

# Names of workers, and texts of theirs.
_OF_WORKERS = frozenset(
    {"prefill_worker", "decode_worker", "prefill", "decode", "lost_workers", "prefill_failure", "unequal_pages"}
)
# Prices grow with what other tenants have in queues and streams, and decide which pages are skipped.
_OF_LOAD = frozenset({"expected_ttft_ms", "price", "runners_up", "skipped_pages"})


def record_values(record: RequestRecord) -> dict[str, Any]:
    return {
        "reason": record.reason,
        **({"pool": entry_of(record.pool)} if record.pool else {}),
        **({"adapter": record.adapter} if record.adapter else {}),
        "prefill_worker": record.prefill_worker,
        "decode_worker": record.decode_worker,
        "prefill_failure": record.prefill_failure or None,
        "lost_workers": record.lost_workers,
        "continued_after": record.resumed_after,
        "ferried_pages": record.transferred_pages,
        "ferried_bytes": record.transferred_bytes,
        "prompt_tokens_by_source": structs.asdict(record.sources),
        **({} if record.cached is None else {"cached_prompt_tokens_by_tier": record.cached.by_tier()}),
    }


def explained(record: RequestRecord) -> dict[str, Any]:
    """Return the record with its placements."""
    return {
        "request_id": record.request_id,
        **record_values(record),
        "state": record.state.value,
        "error_code": record.error_code or None,
        "unequal_pages": record.unequal_pages or None,
        "num_preemptions": record.num_preemptions,
        "choices": [explain(placement) for placement in record.placements],
    }


def for_tenant(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a tenant may see of these values."""
    shown = {name: _hidden(value) if name in _OF_WORKERS else value for name, value in values.items()}
    if "choices" in shown:
        shown["choices"] = [for_tenant(choice) for choice in shown["choices"]]
    return {name: value for name, value in shown.items() if name not in _OF_LOAD}


def _hidden(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [HIDDEN] * len(value)
    return value if value is None else HIDDEN
