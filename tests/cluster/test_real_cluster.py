"""The whole real stack on this machine: vLLM, NIXL, etcd and Ray Serve, started by the command and used over HTTP.

One cluster serves all tests of this file, in order; the last one kills it. Its decode engines speculate, so that an
engine is killed among drafts. `tests/model/test_speculation.py` tests that answers are the same without drafts.
"""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from kvferry.util.shared_memory import recorded
from support.beside import beside
from support.local_machine import (
    Machine,
    a_machine,
    assert_nothing_left,
    kill_everything,
    listening_ports,
    shm_files,
)
from support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.model, pytest.mark.cluster]

MODEL = "SmolLM2-135M-Instruct"
DEBUG = {"x-kvferry-debug": "disaggregate"}  # however short the prompt


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with a_machine("vllm") as machine:
        ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        drafts = f"decode.engine.args={json.dumps({'speculative_config': ngram})}"
        up = machine.up("--set", "decode.replicas=2", "--set", drafts)
        assert up.returncode == 0, up.stdout + up.stderr
        assert "first answer" in up.stdout, up.stdout
        machine.prove()
        yield machine


def members(machine: Machine, kind: str) -> dict[str, dict[str, Any]]:
    """id -> member."""
    status = json.loads(machine.run("status", "--json").stdout)
    return {member["member_id"]: member for member in status["members"] if member["kind"] == kind}


def kill_engine(member: dict[str, Any]) -> None:
    """The engine's processes, as the kernel would when memory runs out; its worker lives."""
    worker = psutil.Process(member["pid"])
    children = {child: " ".join(child.cmdline()) for child in worker.children(recursive=True)}
    engine = [child for child, command in children.items() if "VLLM::" in command]
    # vLLM names its processes itself; until then they are multiprocessing's.
    engine = engine or [child for child, command in children.items() if "spawn_main" in command]
    assert engine, (member, worker, children)
    for process in engine:
        process.send_signal(signal.SIGKILL)


async def busy_workers(gateway: httpx.AsyncClient) -> set[str]:
    """Workers whose engines compute a request, by the gateway's metrics. (`members` takes seconds.)"""
    families = text_string_to_metric_families((await gateway.get("/metrics")).text)
    (running,) = (family for family in families if family.name == "kvferry_worker_requests_running")
    return {sample.labels["worker"] for sample in running.samples if sample.value}


def num_accepted_drafts(member: dict[str, Any]) -> float:
    families = text_string_to_metric_families(
        httpx.get(f"http://{member['metrics_address']}/metrics", timeout=PATIENCE_S).text
    )
    (accepted,) = (family for family in families if family.name == "vllm:spec_decode_num_accepted_tokens")
    return sum(sample.value for sample in accepted.samples if sample.name.endswith("_total"))


def complete(machine: Machine, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    answer = httpx.post(f"{machine.url}/v1/completions", json=body, headers=DEBUG, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def test_a_prompt_is_prefilled_here_and_decoded_there(machine: Machine) -> None:
    answer = complete(machine, "The ferry crosses the river every morning at six and carries " * 8)
    record = answer["kvferry"]
    assert record["prefill_worker"].startswith("prefill-")
    assert record["decode_worker"].startswith("decode-")
    num_prompt_tokens = answer["usage"]["prompt_tokens"]
    assert record["prompt_tokens_by_source"]["external_kv_transfer"] == num_prompt_tokens
    assert record["ferried_pages"] == -(-num_prompt_tokens // 32)
    assert listening_off_loopback(machine) == {}


def test_a_clients_salt_keeps_its_pages_apart(machine: Machine) -> None:
    prompt = "The harbour master counts the boats and writes their names into a book, " * 8

    def num_cached(**salt: str) -> int:
        return int(complete(machine, prompt, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"])

    for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}):
        assert num_cached(**salt) == 0, "pages of another salt"
        wait_until(lambda salt=salt: num_cached(**salt) >= 32, what="pages of the same salt are found")


def listening_off_loopback(machine: Machine) -> dict[int, str]:
    ports = listening_ports(machine.processes())
    return {port: ip for port, ip in ports.items() if not ip.removeprefix("::ffff:").startswith("127.")}


async def test_the_openai_client_unmodified(machine: Machine) -> None:
    async with AsyncOpenAI(base_url=f"{machine.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        messages: Any = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
        chat = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=16, temperature=0, logprobs=True, top_logprobs=3
        )
        choice = chat.choices[0]
        assert "Paris" in (choice.message.content or "")
        assert choice.finish_reason == "stop"
        assert chat.usage is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == chat.usage.completion_tokens
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 3
            # Greedy: what was sampled is the most likely.
            assert entry.top_logprobs[0].token == entry.token

        text, finish, usage = "", None, None
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            for part in chunk.choices:
                text += part.delta.content or ""
                finish = part.finish_reason or finish
            usage = chunk.usage or usage
        assert (text, finish) == (choice.message.content, "stop")
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            chat.usage.prompt_tokens,
            chat.usage.completion_tokens,
        )

        whole = await client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=12, temperature=0)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        pieces = [
            chunk.choices[0].text
            async for chunk in await client.completions.create(
                model=MODEL, prompt="One, two, three,", max_tokens=12, temperature=0, stream=True
            )
        ]
        assert "".join(pieces) == whole.choices[0].text
        assert len(pieces) > 2

        stop = whole.choices[0].text.split()[1]
        stopped = await client.completions.create(
            model=MODEL, prompt="One, two, three,", max_tokens=12, temperature=0, stop=[stop]
        )
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.choices[0].text == whole.choices[0].text.partition(stop)[0]

        drawn = [
            (
                await client.completions.create(
                    model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=1.2, seed=seed
                )
            )
            .choices[0]
            .text
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1]
        assert drawn[0] != drawn[2]

        likely = await client.completions.create(
            model=MODEL, prompt="The capital of Spain is", max_tokens=3, temperature=0, logprobs=2
        )
        logprobs = likely.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens) == likely.choices[0].text
        assert len(logprobs.top_logprobs or ()) == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("completions", {"model": "gpt-9", "prompt": "x"}, 404, ["gpt-9", MODEL]),
        ("completions", {"model": MODEL, "prompt": "hello", "max_tokens": 8192}, 400, ["8192", "1 in the prompt"]),
        ("completions", {"model": MODEL, "prompt": "word " * 9000, "max_tokens": 1}, 400, ["8192"]),
        ("completions", {"model": MODEL, "prompt": [999_999], "max_tokens": 1}, 400, ["999999", "token id"]),
        ("completions", {"model": MODEL, "prompt": "x", "min_tokens": 9, "max_tokens": 2}, 400, ["min_tokens"]),
        ("chat/completions", {"model": MODEL, "messages": []}, 400, ["messages"]),
        ("chat/completions", {"model": MODEL, "messages": [{"role": "user"}]}, 400, ["content"]),
        ("chat/completions", {"model": MODEL, "messages": "hi"}, 400, ["messages", "array"]),
    ],
)
def test_bad_input(machine: Machine, path: str, body: dict[str, Any], status: int, says: list[str]) -> None:
    answer = httpx.post(f"{machine.url}/v1/{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    for word in says:
        assert word in error["message"]


def test_malformed_json_and_a_body_over_the_limit(machine: Machine) -> None:
    url = f"{machine.url}/v1/completions"
    for content, status in ((b'{"model":', 400), (b"x" * (9 << 20), 413)):
        answer = httpx.post(url, content=content, headers={"content-type": "application/json"}, timeout=PATIENCE_S)
        assert answer.status_code == status, answer.text


def chained_schema(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


PATTERNS = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(20)]
# Each ended a gateway, its workers, or all requests of a gateway on a worker.
HARMFUL: dict[str, dict[str, Any]] = {
    "structural tag of chained references": {
        "response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<x>", "schema": chained_schema(10_000), "end": "</x>"}],
            "triggers": ["<x>"],
        }
    },
    "schema of chained references": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": chained_schema(10_000)}}
    },
    "patterns that take minutes together": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": PATTERNS}}}
    },
    "stop token ids": {"stop_token_ids": [7] * 1_400_000},
    "logit bias outside the vocabulary": {"logit_bias": {"10000000": 1}, "n": 3},
}


def processes(machine: Machine) -> dict[str, int]:
    both = members(machine, "prefill") | members(machine, "decode")
    return {member_id: member["pid"] for member_id, member in both.items()}


async def test_harmful_bodies_are_refused_beside_streams_that_go_on(machine: Machine) -> None:
    before = processes(machine)
    prompts = [f"Stream {i} of eight that nothing may disturb tells of" for i in range(8)]
    asked = {"model": MODEL, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=machine.url, timeout=PATIENCE_S) as http:

        async def texts() -> list[str]:
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json={**asked, "prompt": prompt}) for prompt in prompts)
            )
            assert [answer.status_code for answer in answers] == [200] * len(prompts)
            return [answer.json()["choices"][0]["text"] for answer in answers]

        async def verdict(body: dict[str, Any]) -> httpx.Response:
            """Ask again as long as the engines leave the gateway too little CPU time to try the grammar."""
            while True:
                answer = await http.post("/v1/completions", json=body)
                if answer.status_code != 429:
                    return answer

        expected = await texts()
        streams = asyncio.create_task(texts())
        for name, harmful in HARMFUL.items():
            async with asyncio.timeout(PATIENCE_S):
                answer = await verdict({**asked, "prompt": "x", **harmful})
            assert answer.status_code == 400, f"{name}: {answer.text[:300]}"
            error = answer.json()["error"]
            if error["param"] is None:  # values are counted before fields are known
                assert "too many values" in error["message"], name
            else:
                assert error["param"].startswith(next(iter(harmful))), name
            assert len(answer.content) < 2048, name
        assert await streams == expected
    assert processes(machine) == before


async def test_a_decode_engine_killed_mid_stream_changes_nothing_for_the_client(machine: Machine) -> None:
    prompt = "The harbour master of a small town keeps a diary. On the first page he wrote: " * 3
    # Long, because an event may have five tokens, and the engine goes on until the kill.
    values = {"max_tokens": 160, "temperature": 0, "ignore_eos": True}
    undisturbed = await asyncio.to_thread(complete, machine, prompt, **values)
    expected, usage = undisturbed["choices"][0]["text"], undisturbed["usage"]
    decode = await asyncio.to_thread(members, machine, "decode")
    assert len(decode) == 2
    assert sum(map(num_accepted_drafts, decode.values())) > 0

    body = {"model": MODEL, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **values}
    events: list[dict[str, Any]] = []
    killed = ""
    async with (
        httpx.AsyncClient(base_url=machine.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json=body, headers=DEBUG) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 10:
                (killed,) = decode.keys() & await busy_workers(http)
                kill_engine(decode[killed])
    assert not [event for event in events if "error" in event]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == expected
    ends = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert ends == ["length"]
    assert len({event["id"] for event in events}) == 1
    (closing,) = (event for event in events if "kvferry" in event)
    for name in ("prompt_tokens", "completion_tokens"):
        assert closing["usage"][name] == usage[name]
    record = closing["kvferry"]
    assert record["decode_worker"] != killed
    (num_before,) = record["continued_after"]
    assert 10 <= num_before < 160

    def replaced() -> bool:
        return len(members(machine, "decode").keys() - {killed}) == 2

    await asyncio.to_thread(wait_until, replaced, what="a new decode worker")


async def test_a_killed_prefill_engine_costs_no_request_and_comes_back(machine: Machine) -> None:
    ((before_id, before),) = members(machine, "prefill").items()
    prompts = [f"Chapter {i}. " + "The river was wide and the ferry was slow. " * (4 + 3 * i) for i in range(8)]
    answered: list[tuple[str, str | None]] = []
    first_tokens = asyncio.Semaphore(0)

    async with AsyncOpenAI(base_url=f"{machine.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0) as client:

        async def stream(prompt: str) -> None:
            text, finish = "", None
            async for chunk in await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=32, temperature=0, stream=True, extra_body={"ignore_eos": True}
            ):
                if not text and chunk.choices[0].text:
                    first_tokens.release()
                text += chunk.choices[0].text
                finish = chunk.choices[0].finish_reason or finish
            answered.append((text, finish))

        async with beside(*(stream(prompt) for prompt in prompts)) as streams:
            # Some decode, the others still wait for the prefill engine: now it dies.
            for _ in range(2):
                await first_tokens.acquire()
            kill_engine(before)
            await asyncio.gather(*streams)
    assert len(answered) == 8
    assert [finish for _, finish in answered] == ["length"] * 8
    assert all(text for text, _ in answered)

    # Without a prefill worker, a request is answered all the same.
    alone = complete(machine, "Meanwhile, on the other bank of the river,")
    assert alone["choices"][0]["text"]

    def replaced() -> bool:
        return bool(members(machine, "prefill").keys() - {before_id})

    await asyncio.to_thread(wait_until, replaced, what="a new prefill worker")

    def transferred_again() -> bool:
        record = complete(machine, "At last the new ferry came, and everybody went on board. " * 3)["kvferry"]
        if record["ferried_pages"] == 0:
            return False
        assert record["prefill_worker"] != before_id
        return True

    await asyncio.to_thread(wait_until, transferred_again, what="a request ferried by the new worker")


def test_down_after_a_kill_of_everything_leaves_nothing(machine: Machine) -> None:
    processes = machine.processes()
    ports = listening_ports(processes)
    held = recorded(machine.folder.path)
    assert held, "engines hold shared memory, and their workers record it"
    sockets = {file.name for file in machine.folder.path.glob("engine-*/*") if file.is_socket()}
    assert any(len(name) == len(str(uuid.uuid4())) for name in sockets), "vLLM's sockets lie where `down` removes them"
    kill_everything(machine)
    down = machine.down()
    assert down.returncode == 0, down.stdout + down.stderr
    assert_nothing_left(machine, processes, ports)
    assert not held & shm_files()
