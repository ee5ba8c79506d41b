"""kvferry_local/first_answer.py"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from kvferry import config as configuration
from kvferry.config import ClusterConfig
from kvferry_local.first_answer import FirstAnswerFailed, QuestionRefused, ask


@pytest.fixture(params=[400, 503])
def refusing(request: pytest.FixtureRequest) -> Iterator[tuple[int, ClusterConfig]]:
    """A gateway that answers with a status, and its configuration."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(request.param)
            self.end_headers()
            self.wfile.write(b"the model has no chat template")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    gateway = {"host": "127.0.0.1", "http_port": server.server_port}
    yield request.param, configuration.parse({"model": {"path": "m"}, "gateway": gateway})
    server.shutdown()
    server.server_close()


def test_a_question_that_the_model_does_not_take_is_told_apart(refusing: tuple[int, ClusterConfig]) -> None:
    status, config = refusing
    with pytest.raises(FirstAnswerFailed, match=f"answered {status}: the model has no chat template") as caught:
        ask(config)
    assert isinstance(caught.value, QuestionRefused) == (status == 400)
