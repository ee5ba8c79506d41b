"""Write docs/operator/metrics.md from the catalogue of metrics, or with --check fail when it differs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from generated_pages import write_or_check

from kvferry.observability.telemetry import CATALOGUE, IDENTITY, Exporter, Kind, Label, Metric

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operator" / "metrics.md"

_HEAD = """\
# Metrics

Generated from `observability/telemetry.py` by `make metrics-doc`; `make check` says when it is not up to date.

Gateways, workers and keepers each answer Prometheus on a listener of their own (`GET /metrics`, section `metrics` of
the configuration: loopback and any free port unless told otherwise; mutual TLS with `metrics.tls`). Each exports
metrics of itself; gateways also export workers and volumes as they see them, under other names, so that a sum over all
targets counts nothing twice. A gateway answers `/metrics` on its HTTP port as well.

Prometheus finds them all through one gateway, which lists the members' listeners at `/kvferry/v1/targets`:

```yaml
scrape_configs:
  - job_name: kvferry
    http_sd_configs:
      - url: http://127.0.0.1:8000/kvferry/v1/targets
```

Where the gateway has keys, Prometheus shows one with `metrics: true` (`kvferry key new --metrics`):
`authorization: {type: Bearer, credentials_file: FILE}` below the entry of `http_sd_configs`. The listeners of section
`metrics` have no keys but, with `metrics.tls`, certificates: `scheme: https` and `tls_config` with
`ca_file`, `cert_file` and `key_file`.

Each target has the labels `member` (its id), `kind` (gateway, prefill, decode, keeper) and `node`. The same addresses
are in `kvferry status --json` as `metrics_address`. On Kubernetes the chart's `monitoring.members` does the same. Where
ports have to be known, `metrics.gateway_port`, `metrics.worker_port` and `metrics.keeper_port` name the first of 16
each that are tried.

A label with known values has all its series from the start, at zero. A label that names a worker, a keeper or a volume
has series while that is there.
"""

_SECTIONS = (
    (
        Exporter.GATEWAY,
        "Gateways",
        """\
The series of `kvferry_worker_*` and `kvferry_volume_*` are what this gateway last heard of a worker or a volume. Every
gateway has them: take `max by (worker)`, not `sum`.""",
    ),
    (
        Exporter.WORKER,
        "Workers",
        """\
All series have the labels `worker` (its id) and `role` (`prefill` or `decode`).

After these comes everything that vLLM itself exports (`vllm:*`, see its documentation), with the same two labels added.
The simulated engine has none of its own.""",
    ),
    (Exporter.KEEPER, "Keepers", "All series have the label `keeper` (its id)."),
)


def page() -> str:
    parts = [_HEAD]
    for exporter, title, text in _SECTIONS:
        parts.append(f"## {title}\n\n{text}\n\n" + "\n".join(_table(exporter)) + "\n")
    parts.append("## Labels\n\n" + "\n".join(_labels()) + "\n")
    return "\n".join(parts)


def _table(exporter: Exporter) -> Iterator[str]:
    yield "| metric | kind | unit | labels | meaning |"
    yield "|---|---|---|---|---|"
    for metric in CATALOGUE:
        if metric.exporter is exporter:
            labels = ", ".join(f"`{label.name}`" for label in metric.labels) or "–"
            yield f"| `{metric.name}` | {_kind(metric)} | {metric.unit} | {labels} | {metric.help} |"


def _kind(metric: Metric) -> str:
    return f"{metric.kind.value} (`_count`, `_sum`)" if metric.kind is Kind.SUMMARY else metric.kind.value


def _labels() -> Iterator[str]:
    yield "| label | of | meaning | values |"
    yield "|---|---|---|---|"
    label_to_metrics: dict[Label, list[str]] = {}
    for metric in CATALOGUE:
        for label in metric.labels:
            label_to_metrics.setdefault(label, []).append(f"`{metric.name}`")
    for exporter, labels in IDENTITY.items():
        for label in labels:
            label_to_metrics.setdefault(label, []).append(f"all of {exporter.value}s")
    for label, metrics in sorted(label_to_metrics.items(), key=lambda entry: entry[0].name):
        values = ", ".join(f"`{value}`" for value in label.values) or "ids"
        if label.name == "role":
            values = "`prefill`, `decode`"
        yield f"| `{label.name}` | {', '.join(metrics)} | {label.meaning} | {values} |"


def main() -> int:
    pages = {PAGE: page()}
    return write_or_check(pages, source="the catalogue", target="metrics-doc", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
