"""The wait of `kvferry up` for a gateway and all workers."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import GatewayConfig
from kvferry.errors import Interrupted
from kvferry_local import cluster
from kvferry_local.child import Pace, StartFailed
from kvferry_local.progress import NoProgress
from kvferry_local.ray_process import Ray
from kvferry_local.run_folder import RunFolder

TIMEOUT_S = 60.0
ALL_HERE = {"ready": True, "waiting_for": []}
ONE_IS_MISSING = {"ready": True, "waiting_for": ["decode worker"]}
NOT_READY = {"ready": False, "waiting_for": ["prefill worker", "decode worker"]}


class Said(NoProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.details: list[str] = []

    def detail(self, text: str) -> None:
        self.details.append(text)

    def say(self, text: str) -> None:
        self.lines.append(text)


@contextmanager
def gateway(answers: Sequence[dict[str, Any]]) -> Iterator[tuple[GatewayConfig, Callable[[], int]]]:
    """Serve /readyz, each answer once, the last for ever; yield its configuration and the number of questions."""
    num_asked = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal num_asked
            body = json.dumps(answers[min(num_asked, len(answers) - 1)]).encode()
            num_asked += 1
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield GatewayConfig(http_port=server.server_port), lambda: num_asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Looks(Pace):
    """Looks so often without waiting, and then at once says that the time is over."""

    def __init__(self, on_step: Callable[[], None], number: int) -> None:
        super().__init__(on_step)
        self._number = number

    def until(self, condition: Callable[[], bool], *, deadline: float, step_s: float = 0.1) -> bool:
        assert TIMEOUT_S - 30 < deadline - time.monotonic() <= TIMEOUT_S
        return any(condition() for _ in range(self._number))


class Deploy:
    def __init__(self, log: Path, exit_code: int | None = None) -> None:
        self.log = log
        self._exit_code = exit_code

    def exit_code(self) -> int | None:
        return self._exit_code

    def failure(self) -> StartFailed:
        return StartFailed("the end of its log")


def wait_ready(
    tmp_path: Path, config: GatewayConfig, said: Said, log: str = "", exit_code: int | None = None, looks: int = 4
) -> None:
    deploy: Any = Deploy(tmp_path / "deploy.log", exit_code)
    deploy.log.write_text(log)
    parts = cluster._Parts(None, Ray("", ()), deploy)
    cluster._wait_ready(RunFolder(tmp_path), config, parts, said, Looks(said.tick, looks), TIMEOUT_S)


def test_up_waits_for_every_configured_worker(tmp_path: Path) -> None:
    said = Said()
    with gateway([NOT_READY, ONE_IS_MISSING, ONE_IS_MISSING, ALL_HERE]) as (config, num_asked):
        wait_ready(tmp_path, config, said, looks=100)
        assert num_asked() == 4
    assert said.lines == []


def test_a_worker_that_does_not_come_is_named_and_the_others_serve(tmp_path: Path) -> None:
    said = Said()
    with gateway([NOT_READY, ONE_IS_MISSING]) as (config, _):
        wait_ready(tmp_path, config, said)
    (line,) = said.lines
    assert "after 60 s is still waiting for decode worker" in line


def test_a_cluster_that_does_not_get_ready_names_its_missing_parts(tmp_path: Path) -> None:
    late = "not ready after 60 s, still waiting for prefill worker, decode worker"
    with gateway([NOT_READY]) as (config, _), pytest.raises(StartFailed, match=late):
        wait_ready(tmp_path, config, Said())


RETRYING = "INFO Started Serve\nnot healthy yet: DecodeWorker: engine.args.seed: no (A replica failed to start.)\n"
GIVEN_UP = "Ray Serve has given up: the application is DEPLOY_FAILED: DecodeWorker: engine.args.seed: no"


def test_a_cause_is_shown_while_serve_tries_again_and_when_the_time_is_over(tmp_path: Path) -> None:
    said = Said()
    with gateway([NOT_READY]) as (config, _), pytest.raises(StartFailed, match=r"newest in the logs: DecodeWorker: en"):
        wait_ready(tmp_path, config, said, RETRYING)
    assert said.details[0].endswith(" | DecodeWorker: engine.args.seed: no (A replica failed to start.)")


def test_a_part_that_serve_still_mends_is_named_with_the_cause(tmp_path: Path) -> None:
    said = Said()
    with gateway([ONE_IS_MISSING]) as (config, _):
        wait_ready(tmp_path, config, said, RETRYING)
    (line,) = said.lines
    assert "still waiting for decode worker | DecodeWorker: engine.args.seed: no" in line


def test_a_start_ends_at_once_where_serve_has_given_up(tmp_path: Path) -> None:
    with gateway([ONE_IS_MISSING]) as (config, _), pytest.raises(StartFailed) as caught:
        wait_ready(tmp_path, config, Said(), RETRYING + GIVEN_UP + "\n\n", exit_code=1)
    assert caught.value.message == GIVEN_UP


def test_another_end_of_the_deploying_process_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with gateway([NOT_READY]) as (config, _), pytest.raises(StartFailed, match="the end of its log"):
        wait_ready(tmp_path, config, Said(), RETRYING + "RuntimeError: x\n", exit_code=1)


def test_a_pace_looks_until_a_condition_holds_or_its_time_is_over_or_somebody_interrupts() -> None:
    steps: list[None] = []
    pace, answers = Pace(lambda: steps.append(None)), iter([False, False, True])
    assert pace.until(lambda: next(answers), deadline=time.monotonic() + 60, step_s=0.001)
    assert len(steps) == 3
    assert not pace.until(lambda: False, deadline=time.monotonic() + 0.01, step_s=0.001)
    pace.interrupt()
    with pytest.raises(Interrupted):
        pace.until(lambda: False, deadline=time.monotonic() + 60)
