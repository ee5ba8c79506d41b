"""Turns of requests on one engine."""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest

from kvferry.engine.base import (
    CachedTokens,
    EngineOutput,
    EngineRequest,
    EngineTimes,
    FinishReason,
    PromptSources,
    RequestId,
    Sampling,
    Turn,
)
from kvferry.errors import Preempted
from kvferry.tenancy.pages.outcome import OTHER
from kvferry.worker import turns as turns_module
from kvferry.worker.turns import OnEngine, Turns

FIRST = EngineOutput([1], "a")


def request(
    tenant: str,
    num_tokens: int = 100,
    *,
    share: float = 1.0,
    transferred: bool = False,
    num_missing: int | None = None,
    **fields: object,
) -> EngineRequest:
    return EngineRequest(
        RequestId(f"{tenant}-{id(fields)}"),
        array("I", range(num_tokens)),
        Sampling(max_tokens=4),
        transfer_params={"a": 1} if transferred else None,
        turn=Turn(tenant, share, num_tokens if num_missing is None else num_missing),
        **fields,  # type: ignore[arg-type]
    )


class Client:
    """One request that waits for its turn, and stays on the engine until it is told to leave."""

    def __init__(self, turns: Turns, request: EngineRequest, log: list[str], name: str = "") -> None:
        self.begun, self.leave = asyncio.Event(), asyncio.Event()
        self.on_engine: OnEngine | None = None
        self._turns, self._request, self._log = turns, request, log
        assert request.turn is not None
        self.name = name or request.turn.tenant
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._turns.turn(self._request) as self.on_engine:
            self._log.append(self.name)
            self.begun.set()
            await self.leave.wait()

    def first_token(self) -> None:
        assert self.on_engine is not None
        self.on_engine.note(FIRST)

    async def end(self) -> None:
        self.leave.set()
        await self.task


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_engine_gets_little_more_than_a_step_and_the_rest_waits() -> None:
    turns, log = Turns(None, depth_ms=15_000.0), []
    clients = [Client(turns, request("a", 100_000), log) for _ in range(5)]  # 10 s each
    await settled()
    assert len(log) == 2
    assert (turns.num_waiting, turns.num_prompts, turns.waiting_tokens) == (3, 5, 300_000)
    for number, client in enumerate(clients):
        await client.begun.wait()
        times = EngineTimes(0.0, 0.0, 10.0, 10.0, prefill_share=1.0)
        assert client.on_engine is not None
        client.on_engine.note(EngineOutput([1], "a", finish_reason=FinishReason.LENGTH, times=times))
        await settled()
        assert len(log) == min(5, number + 3)
        await client.end()
    assert (turns.num_waiting, turns.waiting_tokens) == (0, 0)
    turns._prompts._queue.check()


async def test_tenants_alternate_by_share_whatever_came_first() -> None:
    turns, log = Turns(None, depth_ms=1.0), []
    noise = [Client(turns, request("noise", 2000), log) for _ in range(12)]
    await settled()
    gold = [Client(turns, request("gold", 2000, share=4.0), log) for _ in range(12)]
    await settled()
    waiting = [*noise, *gold]
    ended = []
    for _ in range(15):
        on_engine = [client for client in waiting if client.on_engine is not None]
        assert len(on_engine) <= 3, "few beyond the depth"
        current = min(on_engine, key=lambda client: client.on_engine.due_ms if client.on_engine is not None else 0.0)
        waiting.remove(current)
        ended.append(current.name)
        times = EngineTimes(0.0, 0.0, 0.2, 0.2, prefill_share=1.0)
        assert current.on_engine is not None
        current.on_engine.note(
            EngineOutput([1], "a", finish_reason=FinishReason.LENGTH, sources=PromptSources(2000), times=times)
        )
        await current.end()
        await settled()
    assert log[0] == "noise"
    assert ended[0] == "gold", "it passes what was begun"
    assert ended.count("gold") in (11, 12)
    for client in waiting:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in waiting), return_exceptions=True)
    assert turns.num_waiting == 0
    turns._prompts._queue.check()


async def test_a_request_that_is_cancelled_leaves_its_place_at_every_moment() -> None:
    for num_slots in (None, 1):
        turns, log = Turns(num_slots, depth_ms=1.0), []
        running = Client(turns, request("a"), log)
        await settled()
        others = [Client(turns, request(tenant), log) for tenant in ("a", "b", "a", "b")]
        await settled()
        assert turns.num_waiting == 4
        others[0].task.cancel()  # in line
        await settled()
        assert turns.num_waiting == 3
        running.leave.set()
        others[1].task.cancel()  # in the turn of the loop in which it may get its place
        await settled()
        running.task.cancel()
        for client in others:
            if client.begun.is_set():
                client.task.cancel()  # on the engine
                await settled()
        await settled()
        for client in others:
            client.task.cancel()
        await asyncio.gather(running.task, *(client.task for client in others), return_exceptions=True)
        assert (turns.num_waiting, turns.waiting_tokens) == (0, 0)
        turns._prompts._queue.check()
        last = Client(turns, request("c"), log)
        await asyncio.wait_for(last.begun.wait(), 5)
        await last.end()
        if turns._slots is not None:
            turns._slots._slots.check()
            assert not turns._slots._lines
            assert turns._slots._slots.num_streams == 0


async def test_slots_go_to_the_tenant_with_the_fewest_streams_for_its_share() -> None:
    turns, log = Turns(5, depth_ms=1e9), []
    noise = [Client(turns, request("noise", transferred=True), log) for _ in range(10)]
    await settled()
    assert log == ["noise"] * 5
    gold = [Client(turns, request("gold", share=4.0, transferred=True), log) for _ in range(10)]
    await settled()
    for client in noise[:5]:
        await client.end()
        await settled()
    assert log[5:] == ["gold"] * 4 + ["noise"]
    for client in [*noise, *gold]:
        client.leave.set()
    await asyncio.gather(*(client.task for client in [*noise, *gold]))
    assert turns.num_waiting == 0


async def test_a_request_that_goes_on_is_first_in_its_tenants_line_only() -> None:
    turns, log = Turns(1, depth_ms=1e9), []
    first = Client(turns, request("a", transferred=True), log)
    await settled()
    clients = [
        Client(turns, request("a", transferred=True), log, "a-late"),
        Client(turns, request("b", transferred=True), log),
        Client(turns, request("a", transferred=True, is_resumed=True), log, "a-resumed"),
    ]
    await settled()
    for client in (first, *clients):
        client.leave.set()
    await asyncio.gather(*(client.task for client in (first, *clients)))
    assert log.index("a-resumed") < log.index("a-late")
    assert log.index("b") < log.index("a-late")


async def test_a_request_without_a_turn_is_the_default_tenants() -> None:
    turns = Turns(None, depth_ms=1.0)
    plain = EngineRequest(RequestId("r"), array("I", range(10)), Sampling(max_tokens=1))
    async with turns.turn(plain) as on_engine:
        assert on_engine.is_computing
        on_engine.note(EngineOutput([], ""))
        assert on_engine.is_computing, "no token yet"
        on_engine.note(FIRST)
        assert not on_engine.is_computing
    assert turns.num_waiting == 0


async def test_the_next_prompt_follows_before_the_engine_has_done_all() -> None:
    turns, log = Turns(None, depth_ms=5.0), []
    first, second, third = (Client(turns, request("a", 500), log) for _ in range(3))  # 51 ms each
    await settled()
    assert len(log) == 1
    await asyncio.wait_for(second.begun.wait(), 5)
    assert not first.task.done()
    for client in (first, second):
        client.first_token()
        await client.end()
    await asyncio.wait_for(third.begun.wait(), 5)
    await third.end()
    assert turns.num_waiting == 0
    assert not turns._prompts._inside


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(turns_module, "_now_s", lambda: now_s[0])
    return now_s


def noise_of(turns: Turns, log: list[str], number: int, **fields: object) -> list[Client]:
    options: dict[str, object] = {"transferred": True, "is_preemptible": True, **fields}
    return [Client(turns, request("noise", **options), log) for _ in range(number)]  # type: ignore[arg-type]


async def end_all(turns: Turns, *clients: Client) -> None:
    for client in clients:
        client.leave.set()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
    assert turns.num_waiting == 0
    assert turns._slots is not None
    assert turns._slots._slots.num_streams == 0
    turns._slots._slots.check()
    turns._prompts._queue.check()


async def test_a_tenant_below_its_share_gets_the_slot_of_a_stream_that_gave_tokens(clock: list[float]) -> None:
    turns, log = Turns(4, depth_ms=1e9), []
    noise = noise_of(turns, log, 6)
    await settled()
    assert len(log) == 4
    for client in noise[1:3]:
        client.first_token()
    clock[0] += turns_module.MIN_GENERATING_S
    gold = Client(turns, request("gold", transferred=True), log)
    await settled()
    assert gold.begun.is_set()
    with pytest.raises(Preempted):
        await noise[1].task
    assert not any(client.task.done() for client in (noise[0], *noise[2:])), "one is enough"
    await end_all(turns, gold, *noise)


@pytest.mark.parametrize("why", ["not allowed", "computing", "too early"])
async def test_a_stream_that_may_not_be_preempted_keeps_its_slot(clock: list[float], why: str) -> None:
    turns, log = Turns(4, depth_ms=1e9), []
    noise = noise_of(turns, log, 4, is_preemptible=why != "not allowed", transferred=why != "computing")
    await settled()
    if why != "computing":
        for client in noise:
            client.first_token()
        clock[0] += turns_module.MIN_GENERATING_S if why == "not allowed" else 0.0
    gold = Client(turns, request("gold", transferred=True), log)
    await settled()
    assert not gold.begun.is_set()
    assert not any(client.task.done() for client in noise)
    if why == "too early":
        clock[0] += turns_module.MIN_GENERATING_S
        await asyncio.wait_for(gold.begun.wait(), 5)
    await end_all(turns, *noise, gold)


async def test_a_stream_gives_tokens_for_as_long_as_its_start_took(clock: list[float]) -> None:
    """What going on costs is no larger part, and a start of minutes keeps no slot for minutes."""
    for start_s, kept_s in ((1.0, 1.0), (100.0, turns_module.MAX_GENERATING_S)):
        turns, log = Turns(4, depth_ms=1e9), []
        noise = noise_of(turns, log, 4)
        await settled()
        clock[0] += start_s
        for client in noise:
            client.first_token()
        gold = Client(turns, request("gold", transferred=True), log)
        clock[0] += kept_s - 0.01
        await settled()
        assert not gold.begun.is_set()
        clock[0] += 0.02
        await asyncio.wait_for(gold.begun.wait(), 5)
        await end_all(turns, *noise, gold)


async def test_streams_that_go_on_wait_in_their_order_before_new_ones() -> None:
    turns, log = Turns(1), []
    held = Client(turns, request("a", transferred=True), log)
    await settled()
    waiting = [
        Client(turns, request("a", transferred=True, is_resumed=is_resumed), log)
        for is_resumed in (False, True, True, False, True)
    ]
    await settled()
    waiting[2].task.cancel()
    await settled()
    held.leave.set()
    for number in (1, 4, 0, 3):
        await asyncio.wait_for(waiting[number].begun.wait(), 5)
        assert not any(
            each.begun.is_set() for each in waiting if each is not waiting[number] and not each.leave.is_set()
        )
        waiting[number].leave.set()
    await end_all(turns, held, *waiting)


async def test_a_prompt_that_waits_for_its_turn_gives_its_slot_at_once() -> None:
    turns, log = Turns(4, depth_ms=1.0), []
    noise = noise_of(turns, log, 4, transferred=False, num_tokens=2000)
    await settled()
    assert len(log) == 1
    gold = Client(turns, request("gold", transferred=True), log)
    await asyncio.wait_for(gold.begun.wait(), 5)
    assert [client.task.done() for client in noise] == [False, True, False, False]
    assert turns.num_prompts == 3
    with pytest.raises(Preempted):
        await noise[1].task
    for client in noise:
        client.task.cancel()
    await end_all(turns, gold, *noise)


async def test_a_stream_that_is_cancelled_and_preempted_ends_as_cancelled(clock: list[float]) -> None:
    for cancels_first in (True, False):
        turns, log = Turns(4, depth_ms=1e9), []
        noise = noise_of(turns, log, 4)
        await settled()
        for client in noise:
            client.first_token()
        clock[0] += turns_module.MIN_GENERATING_S
        if cancels_first:
            noise[0].task.cancel()
        gold = Client(turns, request("gold", transferred=True), log)
        await asyncio.sleep(0)  # gold is in line
        assert noise[0].task.cancelling() == 1
        assert not any(client.task.cancelling() for client in noise[1:])
        if not cancels_first:
            noise[0].task.cancel()
        await settled()
        assert noise[0].task.cancelled()
        assert gold.begun.is_set()
        await end_all(turns, gold, *noise)


async def cancelled(client: Client) -> None:
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
    await settled()


async def test_a_prompt_that_is_cancelled_is_charged_the_time_it_had_the_engine(clock: list[float]) -> None:
    turns, log = Turns(None, depth_ms=1.0), []
    long = Client(turns, request("a", 100_000), log)  # estimated at 10 s
    await settled()
    clock[0] += 0.5
    await cancelled(long)
    assert 499 < turns.served_ms["a"] < 501
    # A small estimate makes it no cheaper.
    cheap = Client(turns, request("b", 100_000, num_missing=12), log)
    await settled()
    clock[0] += 0.9
    await cancelled(cheap)
    assert 899 < turns.served_ms["b"] < 901


async def test_a_cancelled_prompt_that_the_engine_had_not_begun_costs_its_estimate_at_most(clock: list[float]) -> None:
    turns, log = Turns(None, depth_ms=5000.0), []
    first, second = Client(turns, request("a", 20_000), log), Client(turns, request("b", 20), log)
    await settled()
    assert len(log) == 2
    clock[0] += 1.0
    await cancelled(second)
    assert 2 < turns.served_ms["b"] < 4
    clock[0] += 1.0
    await cancelled(first)
    assert 1996 < turns.served_ms["a"] < 1998, "the rest is the other one's"


async def test_one_stalled_prompt_teaches_little(clock: list[float]) -> None:
    turns, log = Turns(None, depth_ms=1.0), []
    stalled = Client(turns, request("a", 40), log)
    await settled()
    clock[0] += 20.0  # for want of memory
    stalled.first_token()
    await stalled.end()
    assert turns._prompts._ms_per_token <= 0.1 * 1.6 + 1e-9
    assert turns.served_ms["a"] <= 4 * 5.1, "a stall is not work"
    for _ in range(40):
        client = Client(turns, request("a", 1000), log)
        await settled()
        clock[0] += 1.0
        client.first_token()
        await client.end()
    assert 0.9 < turns._prompts._ms_per_token < 1.1, "what is true is learned"


async def test_estimates_that_were_too_small_let_few_prompts_onto_the_engine(clock: list[float]) -> None:
    turns, log = Turns(None, depth_ms=30.0), []
    clients = [Client(turns, request("a", 10_000, num_missing=4), log) for _ in range(40)]
    await settled()
    assert len(log) == 4
    short = [Client(turns, request("b", 10), log) for _ in range(2)]
    await settled()
    assert len(log) == 4
    for client in [*clients, *short]:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in [*clients, *short]), return_exceptions=True)
    assert not turns._prompts._uncached_ms
    assert not turns._prompts._inside


async def test_tenants_that_come_and_go_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "MAX_KNOWN", 8)
    turns, log = Turns(4, depth_ms=1e9), []
    for number in range(100):
        client = Client(turns, request(f"t{number}", share=2.0), log)
        await settled()
        client.first_token()
        await client.end()
    assert len(turns.served_ms) <= 9
    assert turns._slots is not None
    assert len(turns._prompts._queue._weights) <= 9
    assert len(turns._slots._slots._weights) <= 9
    assert log == [f"t{number}" for number in range(100)]


async def test_waits_for_slots_are_counted(clock: list[float]) -> None:
    turns, log = Turns(1, depth_ms=1e9), []
    first = Client(turns, request("a", transferred=True), log)
    await settled()
    later = Client(turns, request("b", transferred=True), log)
    await settled()
    clock[0] += 0.3
    await first.end()
    await later.begun.wait()
    await later.end()
    assert (turns.counts["a"].num_slot_waits, turns.counts["a"].slot_waited_s) == (1, 0.0)
    assert (turns.counts["b"].num_slot_waits, turns.counts["b"].slot_waited_s) == (1, pytest.approx(0.3))
    assert turns.counts["b"].num_waits == 0, "it computes no prompt here"


@pytest.mark.parametrize("transferred", [False, True])
async def test_prompt_tokens_of_tenants_are_counted_as_long_as_they_are_known(
    monkeypatch: pytest.MonkeyPatch, transferred: bool
) -> None:
    monkeypatch.setattr(turns_module, "MAX_KNOWN", 3)
    turns, log = Turns(8, depth_ms=1e9), []
    last = EngineOutput((), "", finish_reason=FinishReason.LENGTH, sources=PromptSources(30, 70, 0))
    for name in "aabcda":
        client = Client(turns, request(name, transferred=transferred), log)
        await client.begun.wait()
        assert client.on_engine is not None
        client.on_engine.finished(last)
        await client.end()
    assert turns.prompt_tokens == {"c": 100, "d": 100, "a": 100}, "forgotten, and counted anew"


async def test_times_of_tenants_are_counted_for_a_limited_number(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "MAX_COUNTED", 2)
    turns, log = Turns(None, depth_ms=1.0), []
    first = Client(turns, request("a", 1000), log)
    await settled()
    waits = [Client(turns, request(name, 1000), log) for name in ("b", "c", "d")]
    await settled()
    for client in (first, *waits):
        await client.begun.wait()
        clock[0] += 0.1
        client.first_token()
        await client.end()
    assert turns.counts.keys() == {"a", "b", OTHER}
    assert sum(times.charged_s for times in turns.counts.values()) == pytest.approx(0.4)
    assert turns.counts["a"].waited_s == 0.0
    assert turns.counts["b"].waited_s == pytest.approx(0.1)
    assert (turns.counts[OTHER].num_waits, turns.counts[OTHER].waited_s) == (2, pytest.approx(0.5))


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_to_requests_nothing_is_left(seed: int, clock: list[float]) -> None:
    """Random tenants, streams that are preempted, cancelled, end early or never give a token."""
    chance, turns, log = random.Random(seed), Turns(8, depth_ms=20.0), []
    clients: list[Client] = []
    num_preempted = 0
    for _ in range(3000):
        clock[0] += chance.choice((0.0, 0.01, 0.3))
        tenant, share = chance.choice((*[("a", 1.0)] * 20, ("b", 4.0), ("c", 0.25)))
        if len(clients) < 30:
            options: dict[str, object] = {
                "transferred": chance.random() < 0.5,
                "is_preemptible": chance.random() < 0.8,
                "is_resumed": chance.random() < 0.2,
            }
            one = request(tenant, chance.choice((1, 100, 3000)), share=share, **options)  # type: ignore[arg-type]
            clients.append(Client(turns, one, log))
        client = chance.choice(clients)
        match chance.choices(range(4), (12, 1, 1, 2))[0]:
            case 0 if client.on_engine is not None:
                client.first_token()
            case 1:
                client.leave.set()
            case 2:
                client.task.cancel()
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        num_preempted += sum(
            client.task.done() and not client.task.cancelled() and isinstance(client.task.exception(), Preempted)
            for client in clients
        )
        clients = [client for client in clients if not client.task.done()]
        assert turns._slots is not None
        turns._slots._slots.check()
    assert num_preempted >= 2
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
    await settled()
    assert (turns.num_waiting, turns.num_prompts, turns.waiting_tokens) == (0, 0, 0)
    assert turns._slots._slots.num_streams == 0
    assert turns._slots._preempted is None
    turns._prompts._queue.check()


async def test_hits_are_counted_by_tenant_and_tier() -> None:
    turns, log = Turns(4, depth_ms=1e9), []
    clients = [
        Client(turns, request("a", transferred=True), log),
        Client(turns, request("a"), log),
        Client(turns, request("b"), log),
    ]
    await settled()
    cached = CachedTokens(device=16, volume=32)
    for client in clients:
        assert client.on_engine is not None
        client.on_engine.finished(
            EngineOutput([1], "a", FinishReason.LENGTH, sources=PromptSources(52, 48, 0), cached=cached)
        )
        client.on_engine.finished(EngineOutput([1], "a", FinishReason.ABORT))  # nothing is known of it
    assert (turns.counts["a"].num_prompt_tokens, turns.counts["a"].cached) == (200, cached + cached)
    assert (turns.counts["b"].num_prompt_tokens, turns.counts["b"].cached) == (100, cached)
    await end_all(turns, *clients)
