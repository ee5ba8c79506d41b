"""What the KV transfer brings is what would have been computed: float32, greedy, token for token."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from typing import Any

import msgspec
import psutil
import pytest

from bench.engine_device import on_gpu
from bench.vllm_engines import VllmPair, answer, prefill
from kvferry.engine.base import (
    Continued,
    EngineOutput,
    EngineRequest,
    FinishReason,
    RequestId,
    Sampling,
)
from kvferry.errors import EngineError, InvalidRequest
from support.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.model,
    pytest.mark.shared_pair,
    pytest.mark.asyncio(loop_scope="session"),
]

# Of a GPU's engines NIXL keeps its threads, and steps are not slowed: the machine's cores are not what computes.
_CORES = pytest.mark.skipif(on_gpu(), reason="engines that compute on the cores of the machine")

NUM_PROMPTS = 20
SHORTEST, LONGEST = 30, 3000  # tokens
NUM_TOKENS = 40  # across a page's border

WORDS = (  # noqa: SIM905
    "river ferry page token cluster of the a with carries under light stone morning engine harbour slowly "
    "north winter letter remembers every promise between two quiet islands while nobody counts them"
).split()


def prompts(pair: VllmPair) -> list[list[int]]:
    """Prompts whose lengths are a geometric series, and both sides of a block's border."""
    seeded = random.Random(7)
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** (i / (NUM_PROMPTS - 1))) for i in range(NUM_PROMPTS)]
    lengths[11] = 512  # exactly sixteen pages
    lengths[12] = 513
    made = []
    for length in lengths:
        text = " ".join(seeded.choice(WORDS) for _ in range(length + 50))
        made.append(pair.tokenize(text)[:length])
    assert [len(prompt) for prompt in made] == lengths
    return made


async def test_engines_say_what_their_pages_mean(vllm_pair: VllmPair) -> None:
    fields = dict(vllm_pair.decode.info.exchange)
    assert vllm_pair.prefill.info.exchange == vllm_pair.decode.info.exchange
    assert (fields["attention_backend"] == "CPU_ATTN") != on_gpu()
    assert len(fields["weights"]) == 32
    assert not {"auto", "", "None"} & set(fields.values())


async def test_disaggregated_equals_aggregated(vllm_pair: VllmPair) -> None:
    greedy = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    info, made = vllm_pair.decode.info, prompts(vllm_pair)
    few_at_once = asyncio.Semaphore(4)  # the decode engine computes while the prefill engine does

    async def compare(i: int, prompt: list[int]) -> None:
        async def alone() -> tuple[list[int], EngineOutput]:
            request = EngineRequest(RequestId(f"alone-{i}"), prompt, greedy, cache_salt="aggregated")
            return await answer(vllm_pair.decode, request)

        async def apart() -> tuple[list[int], EngineOutput]:
            transfer = await prefill(vllm_pair.prefill, f"apart-{i}", prompt)
            return await answer(
                vllm_pair.decode, EngineRequest(RequestId(f"apart-{i}"), prompt, greedy, transfer_params=transfer)
            )

        async with few_at_once:
            (aggregated, computed), (disaggregated, transferred) = await asyncio.gather(alone(), apart())
        assert len(aggregated) == NUM_TOKENS
        assert disaggregated == aggregated, f"prompt {i} of {len(prompt)} tokens"
        assert computed.sources is not None
        assert (computed.sources.local_compute, computed.sources.external_kv_transfer) == (len(prompt), 0)
        assert transferred.sources is not None
        sources = (transferred.sources.local_compute, transferred.sources.external_kv_transfer)
        assert sources == (0, len(prompt)), vllm_pair.decode.kv_transfer_stats().num_failed

    before = vllm_pair.decode.stats()
    await asyncio.gather(*(compare(i, prompt) for i, prompt in enumerate(made)))
    after = vllm_pair.decode.stats()
    num_tokens = sum(map(len, made))
    assert after.prompt_tokens.external_kv_transfer - before.prompt_tokens.external_kv_transfer == num_tokens
    assert after.prompt_tokens.local_compute - before.prompt_tokens.local_compute == num_tokens  # the aggregated ones
    num_pages = sum(-(-len(prompt) // info.block_size) for prompt in made)
    assert after.transferred_bytes - before.transferred_bytes == num_pages * info.page_bytes


SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},  # as gateways send it: no answer is blanks without end
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,12}$"},
        "ports": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 65535},
            "minItems": 3,
            "maxItems": 3,
        },
        "is_open": {"type": "boolean"},
    },
    "required": ["name", "ports", "is_open"],
    "additionalProperties": False,
}
STRUCTURES: list[dict[str, object]] = [
    {"json": SCHEMA},
    {"regex": "[a-f]{8}-[0-9]{4}-(open|closed)"},
    {"choice": ["the harbour is open", "the harbour is closed"]},
    {"grammar": 'root ::= "ferry " [a-z] [a-z]? [a-z]? [a-z]? " at " [0-9] [0-9] ":" [0-9] [0-9]'},
]


PENALTIES: dict[str, Any] = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
CHANGES: dict[str, dict[str, Any]] = {
    **{next(iter(each)): {"structured_outputs": json.dumps(each)} for each in STRUCTURES},
    "penalties": {**PENALTIES, "bad_words": ("the", "and"), "max_tokens": 40, "min_tokens": 20},
    "seed": {"temperature": 1.0, "seed": 7, "top_p": 0.9, "max_tokens": 40, "min_tokens": 40},
    "seed and penalties": {
        "temperature": 0.8,
        "seed": -3,
        "top_k": 50,
        "max_tokens": 40,
        "min_tokens": 30,
        **PENALTIES,
    },
    "seed and grammar": {"temperature": 1.0, "seed": 5, "structured_outputs": json.dumps({"regex": "[a-z ]{40,60}"})},
}


_MAX_ANSWERS = 50


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_an_answer_goes_on_exactly_after_any_token(vllm_pair: VllmPair, change: dict[str, Any]) -> None:
    prompt = vllm_pair.tokenize("Describe the harbour as data. ")
    sampling = msgspec.structs.replace(Sampling(max_tokens=80, temperature=0.0), **change)
    # A late reader gets the tokens of several steps in one output, and knows the characters of all alone: the answer is
    # generated again, which does not change it, until enough places are known at which it can go on.
    whole: list[int] = []
    num_given_to_chars: dict[int, int] = {}
    for turn in range(_MAX_ANSWERS):
        request = EngineRequest(RequestId(f"whole-{turn}"), prompt, sampling)
        outputs = [output async for output in vllm_pair.decode.generate(request)]
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        text, finish_reason = "".join(output.text for output in outputs), outputs[-1].finish_reason
        whole = whole or token_ids
        assert token_ids == whole
        num_given = itertools.accumulate(len(output.token_ids) for output in outputs[:-1])
        num_chars = itertools.accumulate(len(output.text) for output in outputs[:-1])
        num_given_to_chars |= {num: chars for num, chars in zip(num_given, num_chars, strict=True) if num < len(whole)}
        if len(num_given_to_chars) > len(whole) // 4:
            break
    assert finish_reason is FinishReason.STOP or not sampling.structured_outputs

    async def go_on(num_given: int, num_chars: int) -> None:
        request = EngineRequest(
            RequestId(f"from-{num_given}"),
            [*prompt, *whole[:num_given]],
            sampling,
            continued=Continued(num_given, num_chars),
        )
        rest = [output async for output in vllm_pair.decode.generate(request)]
        assert [token_id for output in rest for token_id in output.token_ids] == whole[num_given:]
        assert text[:num_chars] + "".join(output.text for output in rest) == text
        assert rest[-1].finish_reason is finish_reason

    assert len(num_given_to_chars) > len(whole) // 4
    await asyncio.gather(*itertools.starmap(go_on, num_given_to_chars.items()))


async def test_tokens_that_do_not_fit_the_grammar_end_their_request_only(vllm_pair: VllmPair) -> None:
    prompt = vllm_pair.tokenize("Describe the harbour. ")
    sampling = Sampling(max_tokens=20, temperature=0.0, structured_outputs=json.dumps({"regex": "[0-9]{30}"}))
    given = vllm_pair.tokenize("letters")
    request = EngineRequest(RequestId("wrong"), [*prompt, *given], sampling, continued=Continued(len(given), 7))
    with pytest.raises(EngineError):
        await answer(vllm_pair.decode, request)
    tokens, _ = await answer(vllm_pair.decode, EngineRequest(RequestId("right"), prompt, sampling))
    assert len(tokens) == 20


async def test_a_pull_that_cannot_be_done_is_recomputed_exactly(vllm_pair: VllmPair) -> None:
    """The prefill engine named in the transfer parameters does not exist (any more)."""
    prompt = vllm_pair.tokenize(
        "The harbour master wrote the same letter every winter morning, and the ferry carried it " * 3
    )
    greedy = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    expected, _ = await answer(vllm_pair.decode, EngineRequest(RequestId("whole"), prompt, greedy, cache_salt="own"))
    kept = await prefill(vllm_pair.prefill, "lost", prompt)
    transfer = dict(kept)
    transfer["remote_engine_id"] = "0" * 32
    transfer["remote_port"] = 1  # nobody listens there
    async with asyncio.timeout(PATIENCE_S):
        tokens, last = await answer(
            vllm_pair.decode,
            EngineRequest(RequestId("lost"), prompt, greedy, transfer_params=transfer, cache_salt="lost"),
        )
    assert tokens == expected
    assert last.sources is not None
    assert last.sources.total >= len(prompt)
    await vllm_pair.prefill.release(kept)  # nobody else will, and an engine that keeps pages keeps looking


async def test_a_pull_after_the_lease_is_recomputed_exactly(vllm_pair: VllmPair) -> None:
    """The prefill engine may have given the pages to another prompt by then; reading them would go unnoticed."""
    prompt = vllm_pair.tokenize("Nobody counts the islands while the letters carry winter light across the north " * 4)
    greedy = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    expected, _ = await answer(
        vllm_pair.decode, EngineRequest(RequestId("in-time"), prompt, greedy, cache_salt="in-time")
    )
    transfer = dict(await prefill(vllm_pair.prefill, "late", prompt))
    assert transfer["remote_blocks_expiry_time"] > time.perf_counter() + 60
    transfer["remote_blocks_expiry_time"] = time.perf_counter() + 1  # less than what is needed to read safely
    tokens, last = await answer(
        vllm_pair.decode,
        EngineRequest(RequestId("late"), prompt, greedy, transfer_params=transfer, cache_salt="late"),
    )
    assert tokens == expected
    assert last.sources is not None
    assert (last.sources.local_compute, last.sources.external_kv_transfer) == (len(prompt), 0)
    await vllm_pair.prefill.release(transfer)


async def test_pages_that_are_not_read_are_released_at_once(vllm_pair: VllmPair) -> None:
    """The decode engine refuses the request, or its client leaves: their lease would keep the pages for minutes."""
    prompt = vllm_pair.tokenize("Two quiet islands remember every letter that the slow ferry carries north " * 6)
    greedy = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    refused = msgspec.structs.replace(greedy, structured_outputs=json.dumps({"regex": "("}))

    async def begin(name: str, sampling: Sampling) -> asyncio.Task[Any]:
        kept = await prefill(vllm_pair.prefill, f"unread-{name}", prompt)
        assert vllm_pair.prefill.stats().num_pages_used > num_used
        request = EngineRequest(RequestId(name), prompt, sampling, transfer_params=kept, cache_salt=name)
        return asyncio.create_task(answer(vllm_pair.decode, request))

    async def released() -> None:
        await until(lambda: vllm_pair.prefill.stats().num_pages_used <= num_used)

    num_used = vllm_pair.prefill.stats().num_pages_used
    await (await begin("read", greedy))  # the engines know each other from here on
    await released()
    with pytest.raises(InvalidRequest):
        await (await begin("refused", refused))
    await released()
    for delay_s in (0.0, 0.002, 0.01):
        left = await begin(f"left-{delay_s}", greedy)
        await asyncio.sleep(delay_s)  # the client leaves at another point of the transfer each time
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await released()


@_CORES
async def test_idle_engines_leave_the_cores_alone(vllm_pair: VllmPair) -> None:
    """Left as they come, NIXL's progress threads keep one core busy per engine for ever."""

    def cpu_s() -> float:
        children = psutil.Process().children(recursive=True)
        return sum(child.cpu_times().user + child.cpu_times().system for child in children)

    window_s = 2.0
    deadline = asyncio.get_running_loop().time() + 180  # longer than the leases of what other tests left kept
    while True:
        before = cpu_s()
        await asyncio.sleep(window_s)  # the window of the measurement
        busy_cores = (cpu_s() - before) / window_s
        if busy_cores < 0.5:  # of the two that would be busy
            break
        assert asyncio.get_running_loop().time() < deadline, f"idle engines keep {busy_cores:.2f} cores busy"


@_CORES
async def test_an_engine_that_keeps_pages_leaves_the_cores_alone(vllm_pair: VllmPair) -> None:
    """Stepped without pause, a prefill engine takes 0.9 cores from the decode engine that reads its pages."""
    children = psutil.Process().children(recursive=True)

    def cpu_s() -> float:
        return sum(child.cpu_times().user + child.cpu_times().system for child in children)

    kept = await prefill(
        vllm_pair.prefill, "kept", vllm_pair.tokenize("Every quiet morning the ferry waits for a letter. " * 8)
    )
    window_s, seen = 2.0, []
    try:
        for _ in range(5):
            before = cpu_s()
            await asyncio.sleep(window_s)  # the window of the measurement
            seen.append((cpu_s() - before) / window_s)
            if seen[-1] < 0.45:
                break
        else:
            pytest.fail(f"engines that keep one prompt's pages keep {seen} cores busy")
    finally:
        await vllm_pair.prefill.release(kept)


async def test_the_compute_thread_keeps_all_cores(vllm_pair: VllmPair) -> None:
    """NIXL's connector pins the thread it is made in to one core; ours undoes it."""
    children = psutil.Process().children(recursive=True)
    # Engines that other tests killed may still be there as zombies, without a command line.
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    processes = {child: " ".join(child.cmdline()) for child in alive}
    engines = {child: command for child, command in processes.items() if "VLLM::" in command}
    assert len(engines) == 2
    for process, command in engines.items():
        assert "VLLM::EngineCore" in command, "without tensor parallelism, the engine core's process computes"
        assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(0)
