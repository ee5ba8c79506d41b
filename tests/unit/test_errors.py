"""The error tree: every leaf says what it is, to clients and across the wire."""

from __future__ import annotations

import http

import grpc
import pytest

from kvferry import errors
from kvferry.engine.base import EngineOutput
from kvferry.errors import ConfigError, KvferryError, LocalError, RequestError, UnavailableError, by_code
from kvferry.link import codec
from kvferry.observability.telemetry import FALLBACK_CAUSES
from kvferry.wire.v1 import worker_pb2 as pb


def tree(kind: type[KvferryError]) -> list[type[KvferryError]]:
    """The kind and all below it; kinds of LocalError stand elsewhere and are loaded or not as other tests please."""
    children = [] if kind is LocalError else kind.__subclasses__()
    return [kind, *(one for child in children for one in tree(child))]


# ConfigError and LocalError never leave the process that starts.
LEAVES = [kind for kind in tree(KvferryError) if len(tree(kind)) == 1 and kind not in (ConfigError, LocalError)]


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_a_leaf_has_a_code_and_statuses(kind: type[KvferryError]) -> None:
    assert kind.code
    assert "code" in vars(kind), "an inherited code would come back as the parent"
    assert 400 <= http.HTTPStatus(kind.http_status) < 600
    assert grpc.StatusCode[kind.grpc_status] is not grpc.StatusCode.OK
    assert kind.openai_type
    assert kind.__doc__


def test_codes_are_unique_and_by_code_finds_every_leaf() -> None:
    codes = [kind.code for kind in tree(KvferryError) if "code" in vars(kind) and kind.code is not None]
    assert len(codes) == len(set(codes))
    for kind in LEAVES:
        assert kind.code is not None
        assert by_code()[kind.code] is kind


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_a_leaf_stays_itself_across_the_wire(kind: type[KvferryError]) -> None:
    step = pb.Step()
    codec.append_failure(step, 3, kind("what was wrong"))
    ((number, error),) = codec.outputs_of(pb.Step.FromString(step.SerializeToString()))
    assert number == 3
    assert not isinstance(error, EngineOutput)
    assert type(error) is kind
    assert error.message == "what was wrong"
    assert error.retry_after_s == kind("").retry_after_s


@pytest.mark.parametrize("text", ["x" * 1024, "x" * 1025, "\u00e9" * 513, "\U0001f600" * 100_000, "\ud800" * 2000])
def test_messages_and_params_are_short(text: str) -> None:
    error = errors.InvalidRequest(f"first {text} last", param=f"p{text}")
    assert len(error.message.encode(errors="surrogatepass")) <= errors.MAX_ERROR_BYTES
    assert error.param is not None
    assert len(error.param.encode(errors="surrogatepass")) <= errors.MAX_PARAM_BYTES
    assert error.message.startswith("first ")
    assert error.message.endswith(" last")
    assert f"{len(text.encode(errors='surrogatepass')) + 11} bytes" in error.message
    assert str(error) == error.message


def test_messages_at_the_limit_are_whole_and_an_operator_reads_all() -> None:
    assert errors.InvalidRequest("x" * errors.MAX_ERROR_BYTES).message == "x" * errors.MAX_ERROR_BYTES
    assert ConfigError("x" * 10_000).message == "x" * 10_000


def test_a_client_is_told_when_to_come_back() -> None:
    for kind in LEAVES:
        assert (kind("").retry_after_s is not None) == (kind.http_status in (429, 503)), kind


def test_what_is_the_clients_to_mend_is_4xx_and_the_rest_is_not() -> None:
    for kind in LEAVES:
        client = issubclass(kind, RequestError) or issubclass(kind, errors.Overloaded)
        assert (400 <= kind.http_status < 500) == client, kind


def test_every_way_a_worker_can_be_unavailable_is_a_cause_of_the_fallback_metric() -> None:
    about_the_gateway = {errors.NotReady, errors.NoDecodeWorker}
    for kind in LEAVES:
        if issubclass(kind, UnavailableError) and kind not in about_the_gateway:
            assert kind.code in FALLBACK_CAUSES
