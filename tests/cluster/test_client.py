"""The typed client, both forms, against a cluster; and the examples of docs/user/clients.md, as a user runs them."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvferry
from kvferry.gateway.identity.key_file import new_key
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry_client import (
    FINISH_REASON_LENGTH,
    AsyncClient,
    CallFailed,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    Message,
    NotFound,
    Overloaded,
    SamplingOptions,
    StructuredOutput,
    Tls,
    Tool,
    Unauthenticated,
    Unavailable,
)
from kvferry_client.errors import failure_of
from support.waiting import until

from .conftest import MODEL, SimCluster, running
from .test_access import Certificates, certificates  # noqa: F401  a fixture

CLIENTS_PAGE = Path(kvferry.__file__).parents[2] / "docs" / "user" / "clients.md"
SECTION = "## gRPC and the Python client"


def target_of(cluster: SimCluster) -> str:
    assert cluster.gateway is not None
    return f"localhost:{cluster.gateway.grpc.port}"


class Both:
    """One form of the client behind one set of methods: the form that waits does so in a thread."""

    def __init__(self, kind: str, cluster: SimCluster, **values: Any) -> None:
        self.client: Any = {"Client": Client, "AsyncClient": AsyncClient}[kind](target_of(cluster), **values)

    async def __call__(self, method: str, *arguments: Any, **values: Any) -> Any:
        bound = getattr(self.client, method)
        if isinstance(self.client, AsyncClient):
            return await bound(*arguments, **values)
        return await asyncio.to_thread(bound, *arguments, **values)

    async def chunks(self, *arguments: Any, **values: Any) -> list[pb.GenerateChunk]:
        stream = await self("stream", *arguments, **values)
        if isinstance(self.client, AsyncClient):
            return [chunk async for chunk in stream]
        return await asyncio.to_thread(list, stream)


@pytest.fixture(params=["Client", "AsyncClient"])
def kind(request: pytest.FixtureRequest) -> str:
    form: str = request.param
    return form


async def test_every_call(cluster: SimCluster, kind: str) -> None:
    client = Both(kind, cluster)
    (model,) = await client("models")
    assert (model.name, model.max_model_len) == (MODEL, 8192)
    tokens = await client("tokenize", "one two three")
    assert len(tokens.token_ids) == 4
    sampling: SamplingOptions = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    by_text = await client("generate", "one two three", return_token_ids=True, **sampling)
    (answer,) = by_text.answers
    assert answer.finish_reason == FINISH_REASON_LENGTH
    assert len(answer.token_ids) == 6
    by_ids = await client("generate", token_ids=tokens.token_ids, **sampling)
    assert by_ids.answers[0].text == answer.text
    chunks = await client.chunks("one two three", model=MODEL, **sampling)
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert chunks[-1].usage == by_text.usage
    messages = [("system", "Be brief."), {"role": "user", "content": "hello"}, Message(role="user", content="you")]
    chat = await client("generate", messages=messages, **sampling)
    assert chat.usage.prompt_tokens == len((await client("tokenize", messages=messages)).token_ids)
    several = await client("generate", "x", num_choices=2, seed=3, logit_bias={5: 1.0}, stop=["q"], max_tokens=3)
    assert len(several.answers) == 2
    text = "word " * 40
    for salt in ("one", "two"):
        assert (await client("generate", text, cache_salt=salt, max_tokens=1)).usage.cached_prompt_tokens == 0
        assert (await client("generate", text, cache_salt=salt, max_tokens=1)).usage.cached_prompt_tokens > 0
    await client("close")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "exactly one of text, messages, token_ids is needed, not none"),
        ({"text": "x", "messages": [("user", "x")]}, "not text and messages"),
        ({"text": "x", "max_tokens": -1}, "max_tokens: -1 cannot be sent"),
        ({"text": "x", "max_tokens": "many"}, "max_tokens: 'many' cannot be sent"),
        ({"text": "x", "stop": "q"}, "stop: 'q' cannot be sent: expected a list"),
        ({"text": "x", "logit_bias": [5]}, r"logit_bias: \[5\] cannot be sent: expected a mapping"),
        ({"text": "x", "top_p": {}}, "top_p: {} cannot be sent: expected one value"),
        ({"text": "x", "cache_salt": 7}, "cache_salt: 7 cannot be sent"),
        ({"text": "x", "cache_ttl_s": "1h"}, "cache_ttl_s: '1h' cannot be sent"),
        ({"text": "x", "no_such": 1}, "no_such: 1 cannot be sent: there is no such parameter"),
        (
            {"text": "x", "prompt_cache_retention": "24h"},
            "prompt_cache_retention: '24h' cannot be sent: .* cache_ttl_s",
        ),
        ({"token_ids": [-1]}, r"ids: \[-1\] cannot be sent"),
        ({"text": "x", "num_choices": 0}, "num_choices: expected a number from 1, not 0"),
        ({"text": "x", "tools": [Tool(name="t")]}, "tools need messages"),
    ],
)
async def test_what_no_message_can_carry_is_refused_by_name(
    cluster: SimCluster, kind: str, values: dict[str, Any], said: str
) -> None:
    client = Both(kind, cluster)
    for method in ("generate", "stream"):
        with pytest.raises((ValueError, TypeError), match=said):
            await client(method, model=MODEL, **values)
    await client("close")


async def test_failures_say_what_was_wrong(kind: str) -> None:
    async with running(gateway={"max_requests": 1}) as cluster:
        client = Both(kind, cluster)
        with pytest.raises(InvalidArgument) as invalid:
            await client("generate", "x", temperature=9.0)
        (violation,) = invalid.value.violations
        assert violation.field == "sampling.temperature"
        assert invalid.value.reason == "INVALID_REQUEST"
        with pytest.raises(InvalidArgument, match="structured_output"):
            await client.chunks("x", structured_output=StructuredOutput(regex="a"))
        with pytest.raises(NotFound, match="gpt-9"):
            await client("generate", "x", model="gpt-9")
        with pytest.raises(NotFound, match="gpt-9"):
            await client("tokenize", "x", model="gpt-9")
        with pytest.raises(DeadlineExceeded):
            await client("generate", "x", max_tokens=8000, ignore_eos=True, timeout_s=0.2)
        await cluster.until_quiet()
        async with AsyncClient(target_of(cluster)) as other:
            busy = await other.stream("x", model=MODEL, max_tokens=8000, ignore_eos=True)
            await anext(busy)
            with pytest.raises(Overloaded) as overloaded:
                await client("generate", "x")
            assert overloaded.value.retry_after_s == 1
            assert overloaded.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            busy.cancel()
        await client("close")
    gone = Both(kind, cluster)
    with pytest.raises(Unavailable):
        await gone("generate", "x", model=MODEL)
    await gone("close")


async def test_leaving_a_stream_ends_the_request(cluster: SimCluster, kind: str) -> None:
    assert cluster.gateway is not None
    admission = cluster.gateway.admission
    left = threading.Event()

    def leave() -> None:
        with Client(target_of(cluster)) as client, client.stream("x", max_tokens=8000, ignore_eos=True) as stream:
            for chunk in stream:
                assert chunk.text
                break
            left.set()

    if kind == "Client":
        await asyncio.to_thread(leave)
        assert left.is_set()
    else:
        async with AsyncClient(target_of(cluster)) as client:
            async with await client.stream("x", max_tokens=8000, ignore_eos=True) as stream:
                await anext(stream)
                assert admission.num_in_flight == 1
            await until(lambda: admission.num_in_flight == 0)
    await cluster.until_quiet()


async def test_keys_and_certificates(
    tmp_path: Path,
    kind: str,
    certificates: Certificates,  # noqa: F811
) -> None:
    key = new_key(tmp_path / "keys.yaml", "acme", "ci")
    cert, private_key = certificates.ours.issue("acme")
    gateway = {"tls": certificates.config(mutual=True), "keys_file": str(tmp_path / "keys.yaml")}
    async with running(gateway=gateway) as cluster:
        ours = Tls(ca_file=certificates.ours.ca_file, cert_file=cert, key_file=private_key)
        client = Both(kind, cluster, api_key=key, tls=ours)
        assert (await client("generate", "x", max_tokens=2)).usage.completion_tokens == 2
        await client("close")
        without_key = Both(kind, cluster, tls=ours)
        with pytest.raises(Unauthenticated) as refused:
            await without_key("models")
        assert refused.value.reason == "INVALID_API_KEY"
        await without_key("close")
        for tls in (Tls(ca_file=certificates.ours.ca_file), Tls(ca_file=certificates.theirs.ca_file), True, False):
            stranger = Both(kind, cluster, api_key=key, tls=tls)
            with pytest.raises(Unavailable):
                await stranger("models")
            await stranger("close")
        with pytest.raises(ValueError, match="go together"):
            Tls(cert_file=cert)


def test_both_forms_take_the_same_arguments_and_those_of_the_message() -> None:
    def parameters(method: Callable[..., Any]) -> list[str]:
        return [str(parameter) for parameter in inspect.signature(method).parameters.values()]

    for name in ("generate", "stream", "tokenize", "models", "close", "__init__"):
        assert parameters(getattr(Client, name)) == parameters(getattr(AsyncClient, name))
    fields = {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    assert set(SamplingOptions.__annotations__) == fields


def test_a_failure_of_another_kind_is_one_too() -> None:
    assert issubclass(Overloaded, CallFailed)
    assert str(CallFailed(grpc.StatusCode.ABORTED, "too slow")) == "ABORTED: too slow"


def examples() -> list[str]:
    section = CLIENTS_PAGE.read_text(encoding="utf-8").partition(f"\n{SECTION}\n")[2]
    section = re.split(r"\n#{1,3} ", section)[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize("example", examples(), ids=lambda code: code.strip().splitlines()[-1][:40])
async def test_an_example_of_the_clients_page_runs_as_it_stands(example: str, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys.yaml", "acme", "readme")
    async with running(gateway={"keys_file": str(tmp_path / "keys.yaml")}) as cluster:
        assert "127.0.0.1:9000" in example
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", example.replace("127.0.0.1:9000", target_of(cluster))),
            env={**os.environ, "KVFERRY_API_KEY": key},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        assert out.strip(), "it says nothing"
        await cluster.until_quiet()


def test_the_clients_page_has_examples_of_both_forms() -> None:
    code = "\n".join(examples())
    for name in ("Client(", "AsyncClient(", ".generate(", ".stream(", ".tokenize(", ".models("):
        assert name in code


def test_a_message_that_grpc_itself_finds_too_large_is_not_to_be_sent_again() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="SERVER: Received message larger than max (9437218 vs. 9437184)",
    )
    failure = failure_of(error)
    assert isinstance(failure, InvalidArgument)
    assert failure.reason == "BODY_TOO_LARGE"
