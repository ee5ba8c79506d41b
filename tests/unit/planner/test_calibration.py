"""Calibration finds the efficiencies that measurements were made with, and refuses what nothing explains."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ConfigError
from kvferry_plan.commands import measuring
from kvferry_plan.commands.measuring import MeasuringFailed, measure
from kvferry_plan.planner.assumptions import DEFAULTS
from kvferry_plan.planner.calibration import Calibration, DecodeMeasurement, PrefillMeasurement, calibrate
from kvferry_plan.planner.gpu_catalogue import shipped
from kvferry_plan.planner.layouts import Layout
from kvferry_plan.planner.roofline import Engine
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
    with endpoint_of(type("_Handler", (_Endpoint,), {"status": status})) as url:
        yield url


@contextmanager
def endpoint_of(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
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


USAGE = b'data: {"choices": [1], "usage": {"prompt_tokens": %s, "completion_tokens": %s}}'


def hostile(get: bytes = b'{"data": [{"id": "m"}]}', post: bytes = b"", status: int = 200) -> Any:
    # `status` is that of a completion; KEY stands for the header with the key.
    def answer(self: Any, content: bytes) -> None:
        self.rfile.read(int(self.headers["content-length"] or 0))
        content = content.replace(b"KEY", (self.headers["authorization"] or "").encode())
        self.send_response(status if self.command == "POST" else 200)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(content)

    methods = {"do_GET": lambda self: answer(self, get), "do_POST": lambda self: answer(self, post)}
    return type("_Hostile", (_Endpoint,), {**methods, "protocol_version": "HTTP/1.0"})


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (hostile(get=b"[" * 200_000), "GET /v1/models: "),
        (hostile(get=b"\xff\xfe["), "GET /v1/models: "),
        (hostile(get=b'{"data": []}'), "GET /v1/models: "),
        (hostile(get=b"x" * (measuring._MAX_RESPONSE_BYTES + 1)), "a response of over 4194304 bytes"),
        (hostile(post=b"x" * (measuring._MAX_RESPONSE_BYTES + 1)), "a response of over 4194304 bytes"),
        (hostile(post=b"x" * (measuring._MAX_RESPONSE_BYTES + 1), status=500), "a response of over 4194304 bytes"),
        (hostile(post=b"data: {nope"), "POST /v1/completions: JSON is malformed"),
        (hostile(post=b'data: {"choices": ' + b"[" * 200_000), "POST /v1/completions: "),
        (hostile(post=b'data: {"choices": [1], "usage": ["prompt_tokens"]}'), "Expected `object | null`"),
        (hostile(post=USAGE % (b'"x"', b"null")), "Expected `int`"),
        (hostile(post=USAGE % (b"0", b"0")), "Expected `int` >= 1"),
        (hostile(post=USAGE % (b"-64", b"3")), "Expected `int` >= 1"),
        (hostile(post=USAGE % (b"1e400", b"5")), "POST /v1/completions: "),
        (hostile(post=USAGE % (b"16777217", b"5")), "<= 16777216"),
        (hostile(post=b'data: {"choices": [1]}'), "without usage"),
        (hostile(post=b'data: {"error": "bad KEY"}'), "bad Bearer \\*\\*\\*"),
        (hostile(post=b"x" * 390 + b" KEY \x1b[31m", status=403), "403: x"),
        (hostile(post=b"bad KEY \x1b[31m", status=403), r"bad Bearer \*\*\* \?\[31m"),
    ],
)  # fmt: skip
def test_what_a_deployment_must_not_send_is_refused_in_words(
    handler: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_API_KEY", "secret-123")
    with endpoint_of(handler) as url, pytest.raises(MeasuringFailed, match=says) as refused:
        measure(url, longest_tokens=2048)
    assert "secr" not in refused.value.message
    assert refused.value.message.isprintable()


def test_a_deployment_that_drips_is_left_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_LIMIT_S", 0.3)
    stop = Event()

    def drip(self: Any) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while not stop.wait(0.02):
                self.wfile.write(b'data: {"choices": [1]}\n\n')

    with endpoint_of(type("_Drip", (_Endpoint,), {"do_POST": drip})) as url:
        with pytest.raises(MeasuringFailed, match=r"not done after 0\.3 s"):
            measure(url, longest_tokens=2048)
        stop.set()


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:99999", "http://", "ftp://a", "http://a\nb", "http://a b"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--calibrate '"):
        measure(url, longest_tokens=100)


def test_no_secret_of_the_url_is_used_or_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="KVFERRY_API_KEY") as refused:
        measure("http://user:secret@127.0.0.1:1", longest_tokens=100)
    assert "secret" not in refused.value.message
    monkeypatch.setenv("KVFERRY_API_KEY", "secret\n1")
    with pytest.raises(ConfigError, match="expected printable ASCII"):
        measure("http://127.0.0.1:1", longest_tokens=100)


def test_steps_that_took_no_time_are_refused() -> None:
    decodes = [DecodeMeasurement(1, 10, 0.0), DecodeMeasurement(2, 10, 0.0)]
    with pytest.raises(ConfigError, match="has to stream each token"):
        calibrate(engine(), [PrefillMeasurement(1000, 1.0), PrefillMeasurement(2000, 2.0)], decodes)
