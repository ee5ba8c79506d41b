"""Calibration finds the efficiencies that measurements were made with, and refuses what nothing explains."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ConfigError
from kvferry.plan_commands import measuring
from kvferry.plan_commands.measuring import MeasuringFailed, measure
from kvferry.planner.assumptions import DEFAULTS
from kvferry.planner.calibration import Calibration, DecodeMeasurement, PrefillMeasurement, calibrate
from kvferry.planner.gpu_catalogue import shipped
from kvferry.planner.layouts import Layout
from kvferry.planner.roofline import Engine
from support.plan_questions import planned_model


def engine(gpu: str = "h100", **assumptions: float) -> Engine:
    fixed = dataclasses.replace(DEFAULTS, **assumptions)
    return Engine(planned_model(), shipped()[gpu], Layout(1), "bfloat16", fixed)


def measured_on(real: Engine) -> Calibration:
    prefills = [PrefillMeasurement(tokens, real.prefill(tokens).total_s) for tokens in (2000, 4000, 8000)]
    decodes = [DecodeMeasurement(batch, 500, real.decode_step(batch, 500).total_s) for batch in (1, 4, 16, 64)]
    return calibrate(engine(), prefills, decodes)


@settings(max_examples=30, deadline=None)
@given(mfu=st.floats(0.05, 0.9), efficiency=st.floats(0.3, 0.9), overhead_s=st.floats(0, 0.05))
def test_the_efficiencies_of_a_memory_bound_engine_are_found(mfu: float, efficiency: float, overhead_s: float) -> None:
    real = engine(prefill_mfu=mfu, memory_efficiency=efficiency, decode_mfu=1.0, step_overhead_s=overhead_s)
    found = measured_on(real)
    assert found.prefill_error < 1e-6
    assert found.decode_error < 1e-6
    assert found.assumptions.prefill_mfu == pytest.approx(mfu, rel=1e-6)
    assert found.assumptions.memory_efficiency == pytest.approx(efficiency, rel=1e-6)
    assert found.assumptions.step_overhead_s == pytest.approx(overhead_s, abs=1e-6)


def test_a_compute_bound_engine_is_told_from_a_memory_bound_one() -> None:
    found = measured_on(engine(prefill_mfu=0.01, memory_efficiency=1.0, decode_mfu=0.001, step_overhead_s=0.02))
    assert found.decode_error < 1e-6
    assert found.assumptions.decode_mfu == pytest.approx(0.001, rel=1e-3)


def test_too_few_measurements_are_refused() -> None:
    two = [DecodeMeasurement(1, 10, 0.1), DecodeMeasurement(2, 10, 0.1)]
    with pytest.raises(ConfigError, match="two prompt lengths"):
        calibrate(engine(), [PrefillMeasurement(10, 1.0)] * 3, two)
    with pytest.raises(ConfigError, match="two batches"):
        calibrate(engine(), [PrefillMeasurement(10, 1.0), PrefillMeasurement(20, 2.0)], two[:1])


def test_a_machine_faster_than_the_catalogue_says_is_refused() -> None:
    prefills = [PrefillMeasurement(1000, 1e-6), PrefillMeasurement(2000, 2e-6)]
    with pytest.raises(ConfigError, match="above what the catalogue says"):
        calibrate(engine(), prefills, [DecodeMeasurement(1, 10, 0.1), DecodeMeasurement(2, 10, 0.1)])


class _Endpoint(BaseHTTPRequestHandler):
    """Answers as an OpenAI server does: `max_tokens` chunks and the usage."""

    status = 200
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.status != 200:
            self._answer(b'{"error": "no"}')
            return
        chunk = json.dumps({"choices": [{"text": "x"}]})
        usage = {"prompt_tokens": 2 * len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        lines = [f"data: {chunk}"] * body["max_tokens"] + [f"data: {json.dumps({'choices': [], 'usage': usage})}"]
        self._answer("\n\n".join([*lines, "data: [DONE]", ""]).encode())

    def _answer(self, content: bytes) -> None:
        self.send_response(self.status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def endpoint(status: int = 200) -> Iterator[str]:
    handler = type("_Handler", (_Endpoint,), {"status": status})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_lengths_and_batches_are_measured() -> None:
    with endpoint() as url:
        found = measure(url, longest_tokens=2048)
    assert [each.num_requests for each in found.decodes] == list(measuring.BATCHES)
    longest = 2048 - measuring.ANSWER_TOKENS
    assert found.prefills[-1].num_tokens == pytest.approx(0.9 * longest, rel=0.05)
    assert all(each.seconds > 0 for each in (*found.prefills, *found.decodes))


def test_what_is_no_deployment_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a URL"):
        measure("127.0.0.1:8000", longest_tokens=100)
    with pytest.raises(MeasuringFailed, match=r"--calibrate http://127\.0\.0\.1:1"):
        measure("http://127.0.0.1:1", longest_tokens=100)
    with endpoint(401) as url, pytest.raises(MeasuringFailed, match="401"):
        measure(url, longest_tokens=100)
