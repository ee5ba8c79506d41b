"""From records to figures: latencies, throughput, goodput, by second and by tenant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvferry_loadtest.histogram import Latencies
from kvferry_loadtest.record import Outcome, Record
from kvferry_loadtest.result import Counts, Distribution, Group, Objective, Second
from kvferry_loadtest.server_metrics import Sample

_OF_RECORD: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "ttft_sent": lambda record: record.ttft_sent_s,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
    "e2e_sent": lambda record: record.e2e_sent_s,
    "predecessor_wait": lambda record: record.predecessor_wait_s if record.sent_s is not None else None,
    "lateness": lambda record: record.lateness_s,
}


def duration_s(records: Sequence[Record]) -> float:
    """From the start to the last end."""
    return max((record.end_s for record in records if record.end_s is not None), default=0.0)


def group_of(records: Sequence[Record], objective: Objective, duration_s: float) -> Group:
    """All figures of some records, which lie within `duration_s`. Latencies are those of requests that ended well."""
    counts = Counter(record.outcome for record in records)
    well = [record for record in records if record.outcome is Outcome.OK]
    latencies: dict[str, Distribution] = {}
    for name, read in _OF_RECORD.items():
        # Its own lateness concerns whatever was sent; what a refusal took is no latency of an answer.
        of = records if name == "lateness" else well
        if distribution := _distribution(value for record in of if (value := read(record)) is not None):
            latencies[name] = distribution
    if itl := _distribution(_gaps(well)):
        latencies["itl"] = itl
    good = sum(keeps_to(record, objective) for record in well)
    per_s = 1 / duration_s if duration_s else 0.0
    return Group(
        counts=Counts(
            planned=len(records),
            ok=counts[Outcome.OK],
            refused=counts[Outcome.REFUSED],
            failed=counts[Outcome.FAILED],
            timed_out=counts[Outcome.TIMED_OUT],
            skipped=counts[Outcome.SKIPPED],
        ),
        latencies=latencies,
        requests_per_s=len(well) * per_s,
        output_tokens_per_s=sum(num_output_tokens(record) for record in well) * per_s,
        prompt_tokens_per_s=sum(record.prompt_tokens or 0 for record in well) * per_s,
        goodput_requests_per_s=good * per_s,
        goodput_share=good / len(records) if records else 0.0,
    )


def keeps_to(record: Record, objective: Objective) -> bool:
    """Whether a request that ended well counts for goodput. A figure that cannot be known keeps to nothing."""
    for limit_ms, value_s in (
        (objective.ttft_ms, record.ttft_s),
        (objective.e2e_ms, record.e2e_s),
        # One token has no time between tokens to miss.
        (objective.tpot_ms if num_output_tokens(record) > 1 else None, record.tpot_s),
    ):
        if limit_ms is not None and (value_s is None or value_s * 1e3 > limit_ms):
            return False
    return True


def num_output_tokens(record: Record) -> int:
    """By the server's count, or else by events."""
    return len(record.token_s) if record.completion_tokens is None else record.completion_tokens


def seconds_of(records: Sequence[Record], samples: Sequence[Sample]) -> tuple[Second, ...]:
    """The run second by second; TTFT by the second in which a request was due."""
    num_seconds = math.ceil(duration_s(records)) if records else 0
    sent, ok, missed = [0] * num_seconds, [0] * num_seconds, [0] * num_seconds
    in_flight = [0] * (num_seconds + 1)  # changes, then summed
    ttft: list[list[float]] = [[] for _ in range(num_seconds)]
    for record in records:
        if record.sent_s is None or record.end_s is None:
            continue
        sent_at = min(int(record.sent_s), num_seconds - 1)
        ended_at = min(int(record.end_s), num_seconds - 1)
        sent[sent_at] += 1
        (ok if record.outcome is Outcome.OK else missed)[ended_at] += 1
        in_flight[sent_at] += 1
        in_flight[ended_at] -= 1
        if record.ttft_s is not None:
            ttft[min(int(record.due_s), num_seconds - 1)].append(record.ttft_s)
    second_to_sample = {int(sample.t_s): sample for sample in samples}
    seconds = []
    running = 0
    for t_s in range(num_seconds):
        running += in_flight[t_s]
        values = sorted(ttft[t_s])
        sample = second_to_sample.get(t_s)
        seconds.append(
            Second(
                t_s=t_s,
                sent=sent[t_s],
                ok=ok[t_s],
                missed=missed[t_s],
                in_flight=running,
                ttft_p50_ms=_nearest_rank_ms(values, 0.5),
                ttft_p99_ms=_nearest_rank_ms(values, 0.99),
                queue_depth=sample.waiting if sample else None,
                kv_utilisation=sample.kv_used_share if sample else None,
            )
        )
    return tuple(seconds)


def errors_of(records: Sequence[Record]) -> dict[str, int]:
    """Errors of the run, most frequent first."""
    return dict(Counter(record.error for record in records if record.error).most_common(50))


def _gaps(records: Iterable[Record]) -> Iterable[float]:
    for record in records:
        for before_s, after_s in zip(record.token_s, record.token_s[1:], strict=False):
            yield after_s - before_s


def _distribution(values_s: Iterable[float]) -> Distribution | None:
    latencies = Latencies()
    for value_s in values_s:
        latencies.add_s(value_s)
    return latencies.distribution() if len(latencies) else None


def _nearest_rank_ms(ascending_s: Sequence[float], share: float) -> float | None:
    if not ascending_s:
        return None
    return ascending_s[max(0, math.ceil(share * len(ascending_s)) - 1)] * 1e3
