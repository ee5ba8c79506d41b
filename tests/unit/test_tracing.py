"""Spans on their way out: bounded, counted, and never in anybody's way."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvferry.config import TracingConfig
from kvferry.errors import ConfigError, NoDecodeWorker
from kvferry.observability import tracing as tracing_module
from kvferry.observability.exposition import SpanCounts
from kvferry.observability.tracing import Clock, TraceContext, Tracing, error_type, start_tracing
from support.waiting import until

CONFIG = TracingConfig(endpoint="collector:4317")
PARENT = TraceContext("00-" + 32 * "a" + "-" + 16 * "b" + "-01", "shop=7")


class Kept(SpanExporter):
    """Keeps what it is given; `hold` makes it wait, `is_away` makes it fail."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.free = threading.Event()
        self.free.set()
        self.is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.free.wait()
        if self.is_away:
            return SpanExportResult.FAILURE
        self.spans += spans
        return SpanExportResult.SUCCESS


def a_tracing(exporter: Kept) -> Tracing:
    return Tracing(CONFIG, service="decode", instance="decode-1", exporter=exporter)


async def test_a_span_goes_out_under_its_parent_with_what_the_process_is() -> None:
    kept = Kept()
    tracing = a_tracing(kept)
    span = tracing.serve(PARENT, "worker decode", {"kvferry.pages": 3, "kvferry.nothing": None})
    assert span.is_sampled
    assert span.context.traceparent.startswith("00-" + 32 * "a")
    assert span.context.tracestate == "shop=7"
    span.record("queue", 10, 5)
    span.end()
    span.end()
    await tracing.close()
    queue, served = kept.spans
    assert served.parent is not None
    assert served.parent.span_id == int(16 * "b", 16)
    assert served.attributes == {"kvferry.pages": 3}
    assert served.resource.attributes["service.name"] == "kvferry-decode"
    assert served.resource.attributes["service.instance.id"] == "decode-1"
    assert queue.parent is not None
    assert served.context is not None
    assert queue.parent.span_id == served.context.span_id
    assert (queue.start_time, queue.end_time) == (5, 5), "never ends before it begins"
    assert tracing.counts == SpanCounts(exported=2)


async def test_more_than_may_wait_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "MAX_WAITING_SPANS", 600)
    kept = Kept()
    tracing = a_tracing(kept)
    kept.free.clear()
    begun_s = time.monotonic()
    for _ in range(1000):
        tracing.serve(PARENT, "worker decode").end()
    assert time.monotonic() - begun_s < 2.0, "nobody waits for the exporter"
    assert tracing.counts == SpanCounts(dropped=400)
    kept.free.set()
    await tracing.close()
    await until(lambda: len(kept.spans) == 600)
    assert tracing.counts == SpanCounts(exported=600, dropped=400)


async def test_a_collector_that_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.is_away = True
    tracing = a_tracing(kept)
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        tracing.serve(PARENT, "worker decode").end()
        await asyncio.to_thread(tracing.flush)
    assert tracing.counts == SpanCounts(failed=3)
    kept.is_away = False
    tracing.serve(PARENT, "worker decode").end()
    await tracing.close()
    said = [record.getMessage() for record in caplog.records if "traces" in record.getMessage()]
    assert said == [
        "traces do not reach collector:4317; they are lost until it answers",
        "traces reach collector:4317 again",
    ]


async def test_closing_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "_CLOSE_TIMEOUT_S", 0.2)
    kept = Kept()
    tracing = a_tracing(kept)
    kept.free.clear()
    tracing.serve(PARENT, "worker decode").end()
    begun_s = time.monotonic()
    await tracing.close()
    assert time.monotonic() - begun_s < 2.0
    kept.free.set()
    await until(lambda: len(kept.spans) == 1)


async def test_a_trace_that_is_not_sampled_makes_nothing() -> None:
    kept = Kept()
    tracing = a_tracing(kept)
    span = tracing.receive({"traceparent": PARENT.traceparent.removesuffix("01") + "00"}, "chat m")
    assert not span.is_sampled
    span.child("decode", remote=True).end()
    span.set({"a": 1})
    span.fail("engine_dead")
    span.end()
    await tracing.close()
    assert not kept.spans


@pytest.mark.parametrize("traceparent", ["", "00-abc", "00-" + 32 * "0" + "-" + 16 * "b" + "-01", "x" * 5000])
async def test_a_parent_that_is_none_begins_a_trace(traceparent: str) -> None:
    kept = Kept()
    tracing = a_tracing(kept)
    tracing.receive({"traceparent": traceparent}, "chat m").end()
    await tracing.close()
    (span,) = kept.spans
    assert span.parent is None


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded() -> None:
    assert start_tracing(TracingConfig(), service="gateway", instance="g") is None
    program = (
        "import sys, kvferry.gateway.lifecycle, kvferry.worker.lifecycle, kvferry_keeper.lifecycle; "
        "print(sorted(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_ca_file_that_is_not_there_is_named() -> None:
    config = TracingConfig.model_validate({"endpoint": "https://c:4317", "ca_file": "/nowhere/ca.crt"})
    with pytest.raises(ConfigError, match=r"tracing\.ca_file: /nowhere/ca\.crt: No such file"):
        start_tracing(config, service="gateway", instance="g")


def test_errors_are_told_by_code() -> None:
    assert error_type(NoDecodeWorker("nobody")) == "no_decode_worker"
    assert error_type(asyncio.CancelledError()) == "cancelled"
    assert error_type(ValueError("secret")) == "ValueError"


def test_times_of_this_machine_become_unix_times() -> None:
    assert Clock().unix_ns(time.monotonic()) == pytest.approx(time.time_ns(), abs=50_000_000)
    assert TraceContext.of("") is None
    assert PARENT.headers() == {"traceparent": PARENT.traceparent, "tracestate": "shop=7"}
