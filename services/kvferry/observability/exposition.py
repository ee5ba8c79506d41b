"""Prometheus text of one process: exactly the metrics that telemetry.py lists for its kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvferry.observability.telemetry import CATALOGUE, SPAN_OUTCOMES, Exporter, Kind, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_CATALOGUE = frozenset(CATALOGUE)


class Reading(NamedTuple):
    """`labels` in the catalogue's order; `total` is a summary's sum."""

    metric: Metric
    labels: tuple[str, ...]
    value: float
    total: float = 0.0


class Exposition:
    """`identity` labels every series. `read` registers metrics that are read at a scrape; others count by
    themselves.
    """

    def __init__(self, exporter: Exporter, identity: Mapping[str, str] | None = None) -> None:
        # `_created` series would be metrics outside the catalogue.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.exporter = exporter
        self._identity = dict(identity or {})
        self._registry = CollectorRegistry()
        self._made: set[Metric] = set()

    def counter(self, metric: Metric) -> Counter:
        series = Counter(metric.name, metric.help, _names(metric), registry=self._claim(metric, Kind.COUNTER))
        _create_all_series(series, metric)
        return series

    def gauge(self, metric: Metric) -> Gauge:
        series = Gauge(metric.name, metric.help, _names(metric), registry=self._claim(metric, Kind.GAUGE))
        _create_all_series(series, metric)
        return series

    def histogram(self, metric: Metric) -> Histogram:
        registry = self._claim(metric, Kind.HISTOGRAM)
        series = Histogram(metric.name, metric.help, _names(metric), buckets=metric.buckets, registry=registry)
        _create_all_series(series, metric)
        return series

    def read(self, metrics: Sequence[Metric], read: Callable[[], Iterable[Reading]]) -> None:
        for metric in metrics:
            self._claim(metric, metric.kind)
        self._registry.register(_Readings(metrics, read))

    @property
    def missing(self) -> frozenset[str]:
        """Catalogue names that are not registered."""
        return frozenset(m.name for m in _CATALOGUE if m.exporter is self.exporter and m not in self._made)

    def render(self) -> bytes:
        return self.render_others(self._registry.collect())

    def render_others(self, families: Iterable[Family]) -> bytes:
        """Render an engine's own families with this identity. Thread-safe."""
        return generate_latest(_Families(_identified(families, self._identity)))

    def _claim(self, metric: Metric, kind: Kind) -> CollectorRegistry:
        """Raises ValueError for metrics that the catalogue lacks or lists for others."""
        if metric not in _CATALOGUE or metric.exporter is not self.exporter or metric.kind is not kind:
            raise ValueError(f"{metric.name}: not a {kind.value} of a {self.exporter.value} in the catalogue")
        if metric in self._made:
            raise ValueError(f"{metric.name} was made already")
        self._made.add(metric)
        return self._registry


def _names(metric: Metric) -> list[str]:
    return [label.name for label in metric.labels]


def _create_all_series(series: Counter | Gauge | Histogram, metric: Metric) -> None:
    if metric.labels:
        for values in itertools.product(*(label.values for label in metric.labels)):
            series.labels(*values)


class _Families(Collector):
    def __init__(self, families: Iterator[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _identified(families: Iterable[Family], identity: Mapping[str, str]) -> Iterator[Family]:
    for family in families:
        if identity:
            copy = Family(family.name, family.documentation, family.type, family.unit)
            copy.samples = [sample._replace(labels={**sample.labels, **identity}) for sample in family.samples]
            yield copy
        else:
            yield family


class _Readings(Collector):
    def __init__(self, metrics: Sequence[Metric], read: Callable[[], Iterable[Reading]]) -> None:
        self._metrics = metrics
        self._read = read

    def describe(self) -> Iterable[Family]:
        return ()  # else registering would read

    def collect(self) -> Iterable[Family]:
        seen: dict[str, dict[tuple[str, ...], Reading]] = {metric.name: {} for metric in self._metrics}
        for reading in self._read():
            seen[reading.metric.name][reading.labels] = reading
        return [_family(metric, seen[metric.name]) for metric in self._metrics]


def _family(metric: Metric, readings: Mapping[tuple[str, ...], Reading]) -> Family:
    names = _names(metric)
    series = {labels: (reading.value, reading.total) for labels, reading in readings.items()}
    for labels in _known(metric, readings):
        series.setdefault(labels, (0.0, 0.0))
    if metric.kind is Kind.COUNTER:
        counter = CounterMetricFamily(metric.name, metric.help, labels=names)
        for labels, (value, _) in series.items():
            counter.add_metric(labels, value)
        return counter
    if metric.kind is Kind.SUMMARY:
        summary = SummaryMetricFamily(metric.name, metric.help, labels=names)
        for labels, (value, total) in series.items():
            summary.add_metric(labels, int(value), total)
        return summary
    gauge = GaugeMetricFamily(metric.name, metric.help, labels=names)
    for labels, (value, _) in series.items():
        gauge.add_metric(labels, value)
    return gauge


def _known(metric: Metric, readings: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    is_open = [not label.values for label in metric.labels]
    owners = {tuple(v for v, free in zip(labels, is_open, strict=True) if free) for labels in readings}
    if not any(is_open):
        owners = {()}
    for owner in owners:
        rest = iter(owner)
        yield from itertools.product(*(label.values or (next(rest),) for label in metric.labels))


class SpanCounts(NamedTuple):
    exported: int = 0
    failed: int = 0
    dropped: int = 0


def read_spans(metric: Metric, counts: SpanCounts) -> Iterator[Reading]:
    for outcome, value in zip(SPAN_OUTCOMES, counts, strict=True):
        yield Reading(metric, (outcome,), value)
