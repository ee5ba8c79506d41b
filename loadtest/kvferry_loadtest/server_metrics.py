"""Figures of a deployment's /metrics, by the names that its servers use.

A deployment may have several metrics addresses (one per server); counters and gauges are summed over them, shares of
memory are averaged. Figures are differences between the begin and the end of the measured part of a run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvferry_loadtest.http_client import HttpClient
from kvferry_loadtest.record import Record
from kvferry_loadtest.result import Server

SAMPLE_EVERY_S = 1.0
FETCH_TIMEOUT_S = 5.0
# Longer than servers take to tell of what they did: kvferry's workers do every second, Ray's agent every five.
SETTLE_S = 1.5
MAX_SETTLING_LOOKS = 6


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """Names of one server's metrics, as samples are called (counters with _total)."""

    name: str
    prompt_by_source: str = ""  # counter, label `source`
    computed_source: str = "local_compute"
    preemptions: str = ""  # counter
    waiting: tuple[str, ...] = ()  # gauges
    kv_used_share: str = ""  # gauge, 0..1
    kv_used: tuple[str, str] | None = None  # gauges: used, there
    bytes_by_tier: Mapping[str, str] = {}  # tier -> counter or histogram sum

    @property
    def samples(self) -> frozenset[str]:
        """All that is read."""
        names = {self.prompt_by_source, self.preemptions, self.kv_used_share, *self.waiting}
        names |= {*(self.kv_used or ()), *self.bytes_by_tier.values()}
        return frozenset(names - {""})

    def lines_of(self, text: str) -> str:
        """The lines of an exposition that are read; all others stay unparsed.

        Servers say a megabyte and more, which takes hundreds of milliseconds to parse, in which no token is timed.
        """
        lines = []
        for name in self.samples:
            at = text.find(f"\n{name}")
            while at >= 0:
                end = text.find("\n", at + 1)
                if text[at + 1 + len(name)] in "{ ":
                    lines.append(text[at:end])
                at = text.find(f"\n{name}", end)
        return "".join(lines) + "\n" if lines else ""


DIALECTS = (
    Dialect(
        name="kvferry",
        prompt_by_source="kvferry_worker_prompt_tokens_total",
        waiting=("kvferry_worker_requests_waiting",),
        kv_used=("kvferry_worker_kv_pages_used", "kvferry_worker_kv_pages"),
        bytes_by_tier={"ferried": "kvferry_worker_ferried_bytes_total"},
    ),
    Dialect(
        name="vllm",
        prompt_by_source="vllm:prompt_tokens_by_source_total",
        preemptions="vllm:num_preemptions_total",
        waiting=("vllm:num_requests_waiting",),
        kv_used_share="vllm:kv_cache_usage_perc",
        bytes_by_tier={
            "ferried": "vllm:nixl_bytes_transferred_sum",
            "tier read": "vllm:kv_offload_tiering_read_bytes_total",
            "tier written": "vllm:kv_offload_tiering_write_bytes_total",
        },
    ),
    # vLLM behind Ray's metrics agent: a colon is not allowed there.
    Dialect(
        name="vllm on ray",
        prompt_by_source="ray_vllm_prompt_tokens_by_source_total",
        preemptions="ray_vllm_num_preemptions_total",
        waiting=("ray_vllm_num_requests_waiting",),
        kv_used_share="ray_vllm_kv_cache_usage_perc",
        bytes_by_tier={"ferried": "ray_vllm_nixl_bytes_transferred_sum"},
    ),
)


class Sample(msgspec.Struct, kw_only=True):
    """One look at all metrics addresses. Counters since the servers began."""

    t_s: float
    dialect: str = ""
    prompt_by_source: dict[str, float] = {}
    preemptions: float | None = None
    waiting: float | None = None
    kv_used_share: float | None = None
    bytes_by_tier: dict[str, float] = {}


def read_text(text: str, t_s: float = 0.0) -> Sample:
    """One server's exposition as a Sample. Raises ValueError for what is no exposition."""
    text = f"\n{text}\n"
    for dialect in DIALECTS:
        if lines := dialect.lines_of(text):
            return _read(dialect, lines, t_s)
    return Sample(t_s=t_s)


def _read(dialect: Dialect, text: str, t_s: float) -> Sample:
    name_to_values: dict[str, list[float]] = {}
    by_source: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if math.isnan(sample.value):
                continue
            name_to_values.setdefault(sample.name, []).append(sample.value)
            if sample.name == dialect.prompt_by_source:
                source = sample.labels.get("source", "")
                by_source[source] = by_source.get(source, 0.0) + sample.value
    result = Sample(t_s=t_s, dialect=dialect.name, prompt_by_source=by_source)
    if (preemptions := name_to_values.get(dialect.preemptions)) is not None:
        result.preemptions = sum(preemptions)
    waiting = [value for name in dialect.waiting for value in name_to_values.get(name, ())]
    if waiting:
        result.waiting = sum(waiting)
    if shares := name_to_values.get(dialect.kv_used_share):
        result.kv_used_share = sum(shares) / len(shares)
    elif dialect.kv_used is not None:
        used, there = (sum(name_to_values.get(name, ())) for name in dialect.kv_used)
        result.kv_used_share = used / there if there else None
    result.bytes_by_tier = {
        tier: sum(name_to_values[name]) for tier, name in dialect.bytes_by_tier.items() if name in name_to_values
    }
    return result


def summed(samples: Sequence[Sample], t_s: float) -> Sample:
    """Several servers as one."""
    total = Sample(t_s=t_s, dialect=next((sample.dialect for sample in samples if sample.dialect), ""))
    shares = [sample.kv_used_share for sample in samples if sample.kv_used_share is not None]
    total.kv_used_share = sum(shares) / len(shares) if shares else None
    for field in ("preemptions", "waiting"):
        values = [value for sample in samples if (value := getattr(sample, field)) is not None]
        setattr(total, field, sum(values) if values else None)
    total.prompt_by_source = _added(sample.prompt_by_source for sample in samples)
    total.bytes_by_tier = _added(sample.bytes_by_tier for sample in samples)
    return total


class Sampler:
    """Looks at the metrics addresses every second while it runs. A look that fails is left out."""

    def __init__(self, clients: Sequence[HttpClient], headers: dict[str, str], now_s: Callable[[], float]) -> None:
        self.samples: list[Sample] = []
        self.first: Sample | None = None
        self.last: Sample | None = None
        self._clients = clients
        self._headers = headers
        self._now_s = now_s
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Counters are counted from now on."""
        self.first = await self._settled()
        self._task = asyncio.create_task(self._look_on())

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self.last = await self._settled()

    async def _settled(self) -> Sample | None:
        """A look after which nothing moves any more: what servers tell of may be seconds old."""
        before = await self._look()
        for _ in range(MAX_SETTLING_LOOKS):
            if before is None:
                return None
            await asyncio.sleep(SETTLE_S)
            now = await self._look()
            if now is None or (now.prompt_by_source, now.bytes_by_tier) == (
                before.prompt_by_source,
                before.bytes_by_tier,
            ):
                return now
            before = now
        return before

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            if (sample := await self._look()) is not None:
                self.samples.append(sample)

    async def _look(self) -> Sample | None:
        """None unless every address answers: half a sum is none."""
        if not self._clients:
            return None
        asked_s = self._now_s()
        answers = await asyncio.gather(
            *(client.fetch("", self._headers, timeout_s=FETCH_TIMEOUT_S) for client in self._clients),
            return_exceptions=True,
        )
        samples = []
        for answer in answers:
            if isinstance(answer, BaseException) or answer[0] != 200:
                return None
            try:
                samples.append(read_text(answer[1].decode("utf-8", "replace")))
            except ValueError:
                return None
        return summed(samples, asked_s)


def server_of(
    first: Sample | None, last: Sample | None, samples: Sequence[Sample], records: Sequence[Record]
) -> Server:
    """Return the figures of the samples; `records` are those that are counted."""
    if first is None or last is None or not last.dialect:
        return Server(dialect="")
    dialect = next(dialect for dialect in DIALECTS if dialect.name == last.dialect)
    by_source = _difference(first.prompt_by_source, last.prompt_by_source)
    computed = by_source.pop(dialect.computed_source, None) if last.prompt_by_source else None
    # By the clients' count: where prompts pass two engines, theirs has each twice.
    prompt = float(sum(record.prompt_tokens or 0 for record in records)) or None
    shares = [sample.kv_used_share for sample in samples if sample.kv_used_share is not None]
    depths = [sample.waiting for sample in samples if sample.waiting is not None]
    return Server(
        dialect=last.dialect,
        prompt_tokens=prompt,
        computed_tokens=computed,
        cached_tokens_by_source=by_source,
        recompute_share=computed / prompt if computed is not None and prompt else None,
        preemptions=None if last.preemptions is None else last.preemptions - (first.preemptions or 0.0),
        kv_utilisation_mean=sum(shares) / len(shares) if shares else None,
        kv_utilisation_max=max(shares, default=None),
        queue_depth_mean=sum(depths) / len(depths) if depths else None,
        ttft_queue_correlation=_correlation(samples, records),
        bytes_by_tier=_difference(first.bytes_by_tier, last.bytes_by_tier),
    )


def _correlation(samples: Sequence[Sample], records: Sequence[Record]) -> float | None:
    """Pearson's r between a request's TTFT and the queue depth of the last sample before it was sent."""
    times = [(sample.t_s, sample.waiting) for sample in samples if sample.waiting is not None]
    pairs: list[tuple[float, float]] = []
    place = -1
    for record in sorted((record for record in records if record.sent_s is not None), key=lambda r: r.sent_s or 0.0):
        while place + 1 < len(times) and times[place + 1][0] <= (record.sent_s or 0.0):
            place += 1
        if place >= 0 and record.ttft_s is not None:
            pairs.append((times[place][1], record.ttft_s))
    if len(pairs) < 3:
        return None
    mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    xx = sum((x - mean_x) ** 2 for x, _ in pairs)
    yy = sum((y - mean_y) ** 2 for _, y in pairs)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return xy / math.sqrt(xx * yy) if xx and yy else None


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}
