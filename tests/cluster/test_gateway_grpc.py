"""kvferry.inference.v1 over real gRPC, with sim engines behind it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from kvferry import config as configuration
from kvferry.config import GatewayConfig
from kvferry.errors import ConfigError, InvalidRequest
from kvferry.gateway.bodies.grpc_bodies import read_generate
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.inference.v1 import inference_pb2_grpc
from kvferry.membership.base import MemberKind
from kvferry.util.addresses import free_port
from kvferry_sim.membership import MemoryMembership
from support.beside import beside
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running

TEXT = "one two three four"
GREEDY = pb.Sampling(max_tokens=8, temperature=0, ignore_eos=True)
ENDLESS = pb.GenerateRequest(model=MODEL, text=TEXT, sampling=pb.Sampling(max_tokens=5000, ignore_eos=True))

# How soon both workers must have let go of a request that nobody waits for.
LET_GO_S = 0.1


def channel_to(cluster: SimCluster) -> grpc.aio.Channel:
    assert cluster.gateway is not None
    return grpc.aio.insecure_channel(f"127.0.0.1:{cluster.gateway.grpc.port}")


def stub_on(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)


@pytest_asyncio.fixture
async def stub(cluster: SimCluster) -> AsyncIterator[Any]:
    async with channel_to(cluster) as channel:
        yield stub_on(channel)


def conversation(*texts: str) -> pb.Conversation:
    return pb.Conversation(messages=[pb.Message(role="user", content=text) for text in texts])


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Kind of detail -> the detail, of a google.rpc.Status that agrees with the status it came with."""
    metadata = error.trailing_metadata() or ()
    status = next(
        rpc_status.status_pb2.Status.FromString(value) for key, value in metadata if key == "grpc-status-details-bin"
    )
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().removeprefix("google.rpc."))
        found[kind.__name__] = kind()
        assert packed.Unpack(found[kind.__name__])
    return found


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (everything(call) if hasattr(call, "__aiter__") else call)
    return caught.value


async def everything(chunks: Any) -> list[Any]:
    return [chunk async for chunk in chunks]


async def http_tokens(cluster: SimCluster, path: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """The text of a stream, and its tokens as its log-probabilities spell them."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 100, "ignore_eos": True, "stream": True, **body}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        answer = await http.post(path, json=body)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and not line.endswith("[DONE]")]
    text, tokens = "", []
    for event in events:
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            logprobs = choice["logprobs"] or {}
            tokens += logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or ()]
    return text, tokens


@pytest.mark.parametrize("kind", ["text", "token_ids", "conversation"])
async def test_a_streams_tokens_equal_those_of_http(cluster: SimCluster, stub: Any, kind: str) -> None:
    sampling = pb.Sampling(max_tokens=100, temperature=0, ignore_eos=True, logprobs=0)
    if kind == "conversation":
        request = pb.GenerateRequest(model=MODEL, conversation=conversation("tell me of the river"), sampling=sampling)
        messages = [{"role": "user", "content": "tell me of the river"}]
        path, body = "/v1/chat/completions", {"messages": messages, "logprobs": True}
    elif kind == "text":
        request = pb.GenerateRequest(model=MODEL, text=TEXT, sampling=sampling)
        path, body = "/v1/completions", {"prompt": TEXT, "logprobs": 0}
    else:
        ids = list((await stub.Tokenize(pb.TokenizeRequest(model=MODEL, text=TEXT))).token_ids)
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=ids), sampling=sampling)
        path, body = "/v1/completions", {"prompt": ids, "logprobs": 0}
    request.return_token_ids = True
    expected_text, expected_tokens = await http_tokens(cluster, path, body)

    chunks = [chunk async for chunk in stub.GenerateStream(request)]
    assert "".join(chunk.text for chunk in chunks) == expected_text
    spelled = [position.top[0].text for chunk in chunks for position in chunk.logprobs]
    assert spelled == expected_tokens
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert len(ids) == len(expected_tokens) == 100
    assert ids == [position.top[0].token_id for chunk in chunks for position in chunk.logprobs]
    assert len(chunks) > 2, "nothing was streamed"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [pb.FINISH_REASON_LENGTH]
    assert chunks[-1].usage.completion_tokens == 100
    assert not any(chunk.HasField("usage") for chunk in chunks[:-1])

    whole = await stub.Generate(request)
    (answer,) = whole.answers
    assert (answer.text, list(answer.token_ids)) == (expected_text, ids)
    assert answer.finish_reason == pb.FINISH_REASON_LENGTH
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    assert whole.model == MODEL


async def test_a_request_goes_where_those_of_http_go(cluster: SimCluster, stub: Any) -> None:
    call = stub.Generate(pb.GenerateRequest(model=MODEL, text=TEXT, sampling=GREEDY))
    answer = await call
    metadata = dict(await call.initial_metadata())
    assert metadata["x-request-id"] == answer.request_id
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        (request,) = (await http.get(f"/kvferry/v1/requests/{answer.request_id}")).json()["requests"]
    assert request["prefill_worker"] == cluster.hosts(MemberKind.PREFILL)[0].worker_id
    assert request["decode_worker"] == cluster.hosts(MemberKind.DECODE)[0].worker_id
    assert cluster.metric('kvferry_requests_total{endpoint="grpc_generate",status="200"}') == 1
    assert cluster.metric("kvferry_generated_tokens_total") == 8


async def test_several_choices_each_have_an_end(stub: Any) -> None:
    request = pb.GenerateRequest(
        model=MODEL, text=TEXT, num_choices=3, sampling=pb.Sampling(max_tokens=6, seed=7, ignore_eos=True)
    )
    whole = await stub.Generate(request)
    texts = ["", "", ""]
    ends = []
    async for chunk in stub.GenerateStream(request):
        texts[chunk.choice] += chunk.text
        if chunk.finish_reason:
            ends.append(chunk.choice)
    assert sorted(ends) == [0, 1, 2]
    assert texts == [answer.text for answer in whole.answers]
    assert len(set(texts)) == 3


async def test_what_stopped_an_answer_is_told(stub: Any) -> None:
    text = (await stub.Generate(pb.GenerateRequest(model=MODEL, text=TEXT, sampling=GREEDY))).answers[0].text
    word = text.split()[3]
    sampling = pb.Sampling(max_tokens=8, temperature=0, stop=[word])
    (answer,) = (await stub.Generate(pb.GenerateRequest(model=MODEL, text=TEXT, sampling=sampling))).answers
    assert answer.finish_reason == pb.FINISH_REASON_STOP
    assert answer.WhichOneof("stopped_by") == "stop_text"
    assert answer.stop_text == word
    assert answer.text == text[: text.index(word)]


async def test_tools_come_as_calls_whole_and_streamed() -> None:
    async with running(model={"path": MODEL, "tool_parser": "sim"}) as cluster, channel_to(cluster) as channel:
        stub = stub_on(channel)
        tool = pb.Tool(name="look", description="Looks.", parameters='{"type": "object", "properties": {}}')
        chat = conversation("what is there?")
        chat.tools.append(tool)
        chat.tool_choice = "look"
        request = pb.GenerateRequest(
            model=MODEL, conversation=chat, sampling=pb.Sampling(max_tokens=200, temperature=0)
        )
        (answer,) = (await stub.Generate(request)).answers
        (call,) = answer.tool_calls
        assert call.name == "look"
        assert isinstance(json.loads(call.arguments), dict)
        assert answer.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        chunks = [chunk async for chunk in stub.GenerateStream(request)]
        pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
        assert [piece.name for piece in pieces if piece.name] == ["look"]
        assert "".join(piece.arguments for piece in pieces) == call.arguments
        assert pb.FINISH_REASON_TOOL_CALLS in {chunk.finish_reason for chunk in chunks}


async def test_tokenize_and_models(stub: Any) -> None:
    models = (await stub.ListModels(pb.ListModelsRequest())).models
    assert [(model.name, model.max_model_len) for model in models] == [(MODEL, 8192)]
    text = await stub.Tokenize(pb.TokenizeRequest(model=MODEL, text=TEXT))
    assert len(text.token_ids) == 5  # with bos
    assert text.max_model_len == 8192
    chat = await stub.Tokenize(pb.TokenizeRequest(model=MODEL, conversation=conversation(TEXT)))
    assert len(chat.token_ids) > 4
    whole = await stub.Generate(pb.GenerateRequest(model=MODEL, conversation=conversation(TEXT), sampling=GREEDY))
    assert whole.usage.prompt_tokens == len(chat.token_ids)


def generate(**values: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": MODEL, "text": TEXT, **values})


def sampled(**values: Any) -> pb.GenerateRequest:
    return generate(sampling=pb.Sampling(**values))


def chat(**values: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=MODEL, conversation=pb.Conversation(**values))


HELLO = [pb.Message(role="user", content="hello")]


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (pb.GenerateRequest(model=MODEL), "prompt"),
        (generate(text=""), "text"),
        (pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds()), "token_ids.ids"),
        (pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=[2**32 - 1])), "token_ids.ids"),
        (pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=[2**31 - 1])), "token_ids.ids"),
        (chat(), "conversation.messages"),
        (chat(messages=[pb.Message(content="hello")]), "conversation.messages[0].role"),
        (chat(messages=[*HELLO, pb.Message(role="robot", content="x")]), "conversation.messages[1].role"),
        (
            chat(messages=[*HELLO, pb.Message(role="assistant", tool_calls=[pb.ToolCall(id="a", arguments="[")])]),
            "conversation.messages[1].tool_calls[0].arguments",
        ),
        (chat(messages=HELLO, tools=[pb.Tool(name="t", parameters="[1]")]), "conversation.tools[0].parameters"),
        (chat(messages=HELLO, tools=[pb.Tool(name="t")], tool_choice="other"), "conversation.tool_choice"),
        (chat(messages=HELLO, template_arguments="{"), "conversation.template_arguments"),
        (sampled(max_tokens=0), "sampling.max_tokens"),
        (sampled(max_tokens=8190), "sampling.max_tokens"),
        (sampled(max_tokens=4, min_tokens=5), "sampling.min_tokens"),
        (sampled(temperature=-1), "sampling.temperature"),
        (sampled(temperature=float("nan")), "sampling.temperature"),
        (sampled(repetition_penalty=float("inf")), "sampling.repetition_penalty"),
        (sampled(top_p=0), "sampling.top_p"),
        (sampled(top_k=-2), "sampling.top_k"),
        (sampled(logprobs=21), "sampling.logprobs"),
        (sampled(stop=[""]), "sampling.stop[0]"),
        (sampled(logit_bias={2**32 - 1: 1.0}), "sampling.logit_bias"),
        (sampled(logit_bias={1: float("nan")}), "sampling.logit_bias"),
        (generate(num_choices=129), "num_choices"),
        (generate(cache_ttl_s=-1.0), "cache_ttl_s"),
        (generate(cache_ttl_s=86401.0), "cache_ttl_s"),
        (generate(cache_ttl_s=float("nan")), "cache_ttl_s"),
        (generate(cache_ttl_s=float("inf")), "cache_ttl_s"),
        (generate(structured_output=pb.StructuredOutput()), "structured_output"),
        (generate(structured_output=pb.StructuredOutput(json_schema="{")), "structured_output.json_schema"),
        (generate(structured_output=pb.StructuredOutput(regex="")), "structured_output.regex"),
        # What the sim engine cannot do; a real one can.
        (generate(structured_output=pb.StructuredOutput(regex="a+")), "structured_output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_names_the_field(stub: Any, request_message: pb.GenerateRequest, field: str) -> None:
    for call in (stub.Generate(request_message), stub.GenerateStream(request_message)):
        error = await refused(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
        details = details_of(error)
        (violation,) = details["BadRequest"].field_violations
        assert violation.field == field
        assert violation.description == error.details()
        assert details["ErrorInfo"].domain == "kvferry"
        assert details["ErrorInfo"].reason in ("INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED")
        assert "Traceback" not in (error.details() or "")


async def test_a_negative_number_of_tokens_is_refused(cluster: SimCluster) -> None:
    """No generated code sends one: as a C program would, with an int32 where uint32 is expected."""
    negative = b"\x08" + b"\xff" * 9 + b"\x01"  # max_tokens = -1
    raw = pb.GenerateRequest(model=MODEL, text=TEXT).SerializeToString() + b"\x2a" + bytes([len(negative)]) + negative
    async with channel_to(cluster) as channel:
        error = await refused(channel.unary_unary("/kvferry.inference.v1.Inference/Generate")(raw))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)["BadRequest"].field_violations[0].field == "sampling.max_tokens"


async def test_two_prompts_in_one_message_are_refused(cluster: SimCluster) -> None:
    """Protobuf would take the last and say nothing."""
    first = pb.GenerateRequest(model=MODEL, text=TEXT).SerializeToString()
    raw = first + pb.GenerateRequest(conversation=conversation("hello"), sampling=GREEDY).SerializeToString()
    async with channel_to(cluster) as channel:
        error = await refused(channel.unary_unary("/kvferry.inference.v1.Inference/Generate")(raw))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "conversation and text" in (error.details() or "")
        assert details_of(error)["BadRequest"].field_violations[0].field == "prompt"
        nonsense = await refused(channel.unary_unary("/kvferry.inference.v1.Inference/Generate")(b"\xff\xff"))
        assert nonsense.code() is grpc.StatusCode.INVALID_ARGUMENT


MANY = 1_000_000


def within(number: int, content: bytes) -> bytes:
    """A field with these bytes, in protobuf's encoding."""
    size, length = len(content), b""
    while size:
        length += bytes([size & 0x7F | (0x80 if size > 0x7F else 0)])
        size >>= 7
    return bytes([number << 3 | 2]) + length + content


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"\x78\x00" * MANY, "message"),
        (within(4, b"\x0a\x00" * MANY), "conversation.messages"),
        (within(4, within(1, b"\x1a\x00" * MANY)), "conversation.messages"),
        (within(4, b"\x12\x00" * MANY), "conversation.tools"),
    ],
    ids=["fields", "messages", "tool calls", "tools"],
)
def test_millions_of_empty_parts_are_refused_before_anybody_looks_at_each(raw: bytes, field: str) -> None:
    began_s = time.process_time()
    pb.GenerateRequest.FromString(raw)
    parsing_s = time.process_time() - began_s
    with pytest.raises(InvalidRequest, match=r"too many|more than") as refused:
        read_generate(raw)
    assert refused.value.param == field
    assert time.process_time() - began_s < 5 * parsing_s + 0.1


async def test_a_port_that_is_taken_is_named_and_replicas_share_one(cluster: SimCluster) -> None:
    assert cluster.gateway is not None
    taken = cluster.gateway.grpc.port

    def another(**gateway: Any) -> GatewayHost:
        values = {**cluster.config.model_dump(mode="json"), "gateway": {"http_port": 0, **gateway}}
        return GatewayHost(configuration.parse(values), MODEL, MemoryMembership(cluster.registry))

    alone = another(grpc_port=taken)
    try:
        with pytest.raises(ConfigError, match=rf"gateway\.grpc_port: 127\.0\.0\.1:{taken} cannot be used"):
            await alone.start()
    finally:
        await alone.stop()
    shared = free_port()
    replicas = [another(grpc_port=shared, replicas=2) for _ in range(2)]
    try:
        for replica in replicas:
            await replica.start()
        assert [replica.grpc.port for replica in replicas] == [shared, shared]
    finally:
        for replica in replicas:
            await replica.stop()


async def test_a_message_that_is_too_large_is_refused_by_name() -> None:
    async with running(gateway={"max_body_bytes": 4096}) as cluster, channel_to(cluster) as channel:
        error = await refused(stub_on(channel).Generate(generate(text="word " * 1000)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "4096" in (error.details() or "")
        assert details_of(error)["ErrorInfo"].reason == "BODY_TOO_LARGE"
        assert details_of(error)["BadRequest"].field_violations[0].field == "message"
        # So large that nobody reads it.
        far = await refused(stub_on(channel).Generate(generate(text="word " * 10_000)))
        assert far.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_unknown_model_is_not_found(stub: Any) -> None:
    for call in (
        stub.Generate(generate(model="gpt-9")),
        stub.GenerateStream(generate(model="gpt-9")),
        stub.Tokenize(pb.TokenizeRequest(model="gpt-9", text="x")),
    ):
        error = await refused(call)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "gpt-9" in (error.details() or "")
        assert MODEL in (error.details() or "")
        assert details_of(error)["ErrorInfo"].reason == "MODEL_NOT_FOUND"


async def test_a_long_message_of_an_error_still_arrives(stub: Any) -> None:
    error = await refused(stub.Generate(generate(model="水" * 5000)))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert details_of(error)["ErrorInfo"].reason == "MODEL_NOT_FOUND"


async def test_overload_counts_both_protocols_and_says_when_to_come_back() -> None:
    async with (
        running(gateway={"max_requests": 2}, sim={"step_ms": 20.0}) as cluster,
        channel_to(cluster) as channel,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        stub = stub_on(channel)
        stream = stub.GenerateStream(ENDLESS)
        await stream.read()
        body = {"model": MODEL, "prompt": TEXT, "max_tokens": 5000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as other:
            pieces = other.aiter_bytes()  # dropped, it would close the stream
            await anext(pieces)
            error = await refused(stub.Generate(generate(sampling=GREEDY)))
            assert (await http.post("/v1/completions", json=body)).status_code == 429
        stream.cancel()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = details_of(error)
    assert details["ErrorInfo"].reason == "OVERLOADED"
    assert details["RetryInfo"].retry_delay.seconds >= 1


async def test_without_a_decode_worker_it_is_unavailable() -> None:
    async with running(prefill=1, decode=0) as cluster, channel_to(cluster) as channel:
        error = await refused(stub_on(channel).Generate(generate(sampling=GREEDY)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert details_of(error)["ErrorInfo"].reason == "NO_DECODE_WORKER"
    assert details_of(error)["RetryInfo"].retry_delay.seconds >= 1


@pytest.mark.usefixtures("short_worker_wait")
async def test_a_lost_decode_worker_is_not_the_clients_business() -> None:
    """The stream goes on elsewhere, token for token; only when nobody is left does it end, as unavailable."""
    async with (
        running(decode=2, sim={"step_ms": 5.0}) as cluster,
        channel_to(cluster) as channel,
    ):
        stub = stub_on(channel)
        request = sampled(max_tokens=60, temperature=0, ignore_eos=True)
        undisturbed = (await stub.Generate(request)).answers[0].text
        for expected in ("the whole answer", "UNAVAILABLE"):
            stream = stub.GenerateStream(request)
            chunks = aiter(stream)
            text = (await anext(chunks)).text
            (busy,) = [
                (host, engine)
                for host, engine in cluster.workers
                if host.member.kind is MemberKind.DECODE
                and engine.stats().num_running
                and not host.server.died.is_set()
            ]
            busy[0].server.engine_died("killed by a test")
            if expected == "UNAVAILABLE":
                error = await refused(chunks)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert details_of(error)["RetryInfo"].retry_delay.seconds >= 1
            else:
                assert text + "".join([chunk.text for chunk in await everything(chunks)]) == undisturbed


def loads(cluster: SimCluster) -> Sequence[int]:
    return [load.num_running + load.num_waiting for load in (engine.stats() for _, engine in cluster.workers)]


async def let_go_s(cluster: SimCluster, since_s: float) -> float:
    await until(lambda: not any(loads(cluster)), what="both workers let go")
    return time.perf_counter() - since_s


async def at_once(attempt: Callable[[], Awaitable[float]]) -> None:
    """One of a few attempts: a machine that does other work too is slow, not wrong."""
    seconds: list[float] = []
    while not seconds or seconds[-1] >= LET_GO_S:
        assert len(seconds) < 3, f"both workers let go after {seconds} s"
        seconds.append(await attempt())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_cancel_reaches_the_decode_worker_at_once(cluster: SimCluster, stub: Any, method: str) -> None:
    assert cluster.gateway is not None
    admission, num_cancelled = cluster.gateway.admission, 0

    async def attempt() -> float:
        nonlocal num_cancelled
        call = getattr(stub, method)(ENDLESS)
        await until(lambda: any(loads(cluster)[1:]), what="the decode worker has it")
        cancelled_s = time.perf_counter()
        call.cancel()
        num_cancelled += 1
        return await let_go_s(cluster, cancelled_s)

    await at_once(attempt)
    await cluster.until_quiet()
    await until(lambda: admission.num_in_flight == 0)
    endpoint = {"Generate": "grpc_generate", "GenerateStream": "grpc_generate_stream"}[method]
    assert cluster.metric(f'kvferry_requests_total{{endpoint="{endpoint}",status="499"}}') == num_cancelled


async def test_cancel_reaches_the_prefill_worker_at_once() -> None:
    async with running(sim={"prefill_tokens_per_s": 100.0}) as cluster, channel_to(cluster) as channel:

        async def attempt() -> float:
            call = stub_on(channel).GenerateStream(generate(text="word " * 2000, sampling=GREEDY))
            await until(lambda: loads(cluster)[0] == 1, what="the prefill worker has it")
            cancelled_s = time.perf_counter()
            call.cancel()
            return await let_go_s(cluster, cancelled_s)

        await at_once(attempt)
        await cluster.until_quiet()


@pytest.mark.parametrize("during", ["prefill", "decode"])
async def test_a_deadline_ends_the_request_on_both_workers(during: str) -> None:
    slow = {"prefill_tokens_per_s": 100.0} if during == "prefill" else {"step_ms": 5.0}
    request = generate(text="word " * 2000, sampling=GREEDY) if during == "prefill" else ENDLESS
    deadline_s = 0.1
    async with running(sim=slow) as cluster, channel_to(cluster) as channel:

        async def attempt() -> float:
            nonlocal deadline_s
            num_placed = 0.0
            while not num_placed:
                deadline_s *= 2  # a busy machine takes a while to place it
                before = cluster.metric('kvferry_placements_total{reason="disaggregated"}')
                begun_s = time.perf_counter()
                error = await refused(stub_on(channel).GenerateStream(request, timeout=deadline_s))
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                num_placed = cluster.metric('kvferry_placements_total{reason="disaggregated"}') - before
            return await let_go_s(cluster, begun_s + deadline_s)

        await at_once(attempt)
        await cluster.until_quiet()


async def test_the_gateways_own_limit_is_told_as_a_deadline() -> None:
    async with running(gateway={"request_timeout_s": 0.3}) as cluster, channel_to(cluster) as channel:
        error = await refused(stub_on(channel).GenerateStream(ENDLESS))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.3 s" in (error.details() or "")
        assert details_of(error)["ErrorInfo"].reason == "DEADLINE_EXCEEDED"
        await cluster.until_quiet()


async def test_a_client_that_leaves_ends_its_requests(cluster: SimCluster) -> None:
    channel = channel_to(cluster)
    stream = stub_on(channel).GenerateStream(ENDLESS)
    await stream.read()
    await channel.close()
    await cluster.until_quiet()


async def test_a_client_that_does_not_read_is_cut() -> None:
    async with running(sim={"step_ms": 0.0}) as cluster:
        assert cluster.gateway is not None
        cluster.gateway.app.unread_answers.max_stream_bytes = 64 << 10
        small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
        address = f"127.0.0.1:{cluster.gateway.grpc.port}"
        async with grpc.aio.insecure_channel(address, options=small) as channel:
            request = sampled(max_tokens=6000, ignore_eos=True, logprobs=20)
            request.num_choices = 8
            stream = stub_on(channel).GenerateStream(request)
            await until(lambda: cluster.metric("kvferry_slow_clients_total") == 1, what="the client was cut")
            await cluster.until_quiet()
            admission = cluster.gateway.admission
            await until(lambda: admission.num_in_flight == 0, what="it does not keep its place")
            error = await refused(stream)
            # The status, or the end of the connection where the client has not read it in time.
            assert error.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)
            if error.code() is grpc.StatusCode.ABORTED:
                assert str(64 << 10) in (error.details() or "")


async def test_reflection_lists_everything(cluster: SimCluster) -> None:
    async with channel_to(cluster) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest

        async def answers(*requests: Any) -> list[Any]:
            return [answer async for answer in stub.ServerReflectionInfo(iter(requests))]

        (listed,) = await answers(ask(list_services=""))
        assert {service.name for service in listed.list_services_response.service} == {
            "kvferry.inference.v1.Inference",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        (found,) = await answers(ask(file_containing_symbol="kvferry.inference.v1.Inference"))
        assert found.file_descriptor_response.file_descriptor_proto[0] == pb.DESCRIPTOR.serialized_pb
        methods = [method.name for method in pb.DESCRIPTOR.services_by_name["Inference"].methods]
        for method in methods:
            response = await refused_or_answered(channel, f"/kvferry.inference.v1.Inference/{method}")
            assert response is not grpc.StatusCode.UNIMPLEMENTED, f"{method} is listed and not served"


async def refused_or_answered(channel: grpc.aio.Channel, path: str) -> grpc.StatusCode:
    try:
        await channel.unary_unary(path)(b"")
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_health_follows_readiness() -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    async with running(prefill=1, decode=0) as cluster, channel_to(cluster) as channel:
        assert cluster.gateway is not None
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answer.status)

        watched = stub.Watch(health_pb2.HealthCheckRequest(service="kvferry.inference.v1.Inference"))
        assert (await watched.read()).status == not_serving
        assert await status("") == await status("kvferry.inference.v1.Inference") == not_serving
        host, _ = await cluster.add_worker(MemberKind.DECODE)
        assert (await watched.read()).status == serving
        assert await status("") == serving
        host.server.refuse_new()
        assert (await watched.read()).status == not_serving
        await cluster.add_worker(MemberKind.DECODE)
        assert (await watched.read()).status == serving
        assert (await refused(stub.Check(health_pb2.HealthCheckRequest(service="x")))).code() is (
            grpc.StatusCode.NOT_FOUND
        )
        async with beside(cluster.gateway.drain()) as (draining,):
            assert (await watched.read()).status == not_serving
            await draining
        # It listens no more, so that the next call goes to another gateway.
        await leave(channel)
        ended = (await refused(stub.Check(health_pb2.HealthCheckRequest()))).code()
        assert ended is grpc.StatusCode.UNAVAILABLE


async def test_a_gateway_that_lingers_is_not_ready_and_still_serves() -> None:
    async with running(gateway={"linger_s": 60}) as cluster, httpx.AsyncClient(base_url=cluster.url) as client:
        gateway = cluster.gateway
        assert gateway is not None
        async with beside(gateway.drain()):
            await until(lambda: not gateway.readiness().ready)
            assert (await client.get("/readyz")).status_code == 503
            for stream in (False, True):
                body = {"model": "sim-model", "prompt": "still there?", "max_tokens": 4, "stream": stream}
                answer = await client.post("/v1/completions", json=body)
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")


async def leave(channel: grpc.aio.Channel) -> None:
    """Wait until the client knows that its gateway drains: gRPC's server cancels calls that are sent before."""
    while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
        await asyncio.wait_for(channel.wait_for_state_change(state), 10)


async def test_a_draining_gateway_refuses_and_finishes_what_it_has(cluster: SimCluster) -> None:
    assert cluster.gateway is not None
    async with channel_to(cluster) as channel:
        stub = stub_on(channel)
        chunks = aiter(stub.GenerateStream(sampled(max_tokens=300, ignore_eos=True)))
        await anext(chunks)
        async with beside(cluster.gateway.drain()) as (draining,):
            admission = cluster.gateway.admission
            await until(lambda: admission.draining)
            await leave(channel)
            # Neither on this connection nor on a new one: the port may belong to another gateway by now.
            error = await refused(stub.Generate(generate(sampling=GREEDY)))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", cluster.gateway.grpc.port)
            assert (await everything(chunks))[-1].usage.completion_tokens == 300
            await draining


async def test_no_grpc_where_none_is_configured() -> None:
    async with running(gateway={"grpc_port": None}) as cluster:
        assert cluster.gateway is not None
        assert cluster.gateway.grpc.port == 0


def test_the_port_is_9000_unless_told_otherwise() -> None:
    assert GatewayConfig().grpc_port == 9000
