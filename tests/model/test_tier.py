"""Real engines with a CPU tier and a keeper's volume: what was computed once is not computed again, and never wrong.

One prefill engine computes prompts and ends; a decode engine that never saw them goes on, and a prefill engine of
another node, with a keeper and a volume of its own. The tests share them, in order: the last one kills the decode
engine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from bench.engine_device import engine_config, model_config
from bench.tiny_models import make_model
from kvferry.engine.base import (
    CachedTokens,
    Engine,
    EngineOutput,
    EngineRequest,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
    TransferParams,
)
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.errors import EngineDead
from kvferry.pages.keys import route_keys, seed_of
from kvferry.residency.index import Tier
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.terms import TierTerms
from kvferry.worker.page_mirror import PageMirror
from kvferry_keeper.store.chunk_file import chunk_file_bytes
from support.tier_chunks import chunk_files
from support.tier_node import NodeProcess
from support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


BLOCK_SIZE = 32
NUM_PAGES = 12
PROMPT_TOKENS = NUM_PAGES * BLOCK_SIZE + 13
NUM_TOKENS = 16
NUM_PROMPTS = 9
NUM_BLOCKS = 80  # of a device; six prompts
# The CPU tiers have room for four prompts.
PAGE_BYTES = BLOCK_SIZE * 16_384
OPTIONS: dict[str, Any] = {
    "io_timeout_s": 2.0,
    "cpu_gib": 4.5 * NUM_PAGES * PAGE_BYTES / 2**30,
    "blocks_per_chunk": 1,
    "volume": {"capacity_gib": 2.0},
}
# The first node's volume has room for 14 prompts, and floors.
VOLUME_PAGES = 170
SMALL_VOLUME = {"capacity_gib": VOLUME_PAGES * chunk_file_bytes(PAGE_BYTES) / (1 << 30)}
FLOORS = {"acme": 0.75, "gold": 0.1, "moved": 0.1}
TENANTS = {name: {"floor": FLOORS.get(name, 0.0), "cap": 1.0} for name in ("acme", "gold", "moved", "plain", "noise")}
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
ACME = TierHints(Namespace("acme", 3))
SALT = "acme's"
STEP_TOKENS = 256

_fresh = itertools.count()


def prompt_of(i: int) -> list[int]:
    seeded = random.Random(i)
    return [seeded.randrange(200, 40_000) for _ in range(PROMPT_TOKENS)]


async def run(engine: Engine, prompt: Sequence[int], **values: object) -> tuple[list[int], EngineOutput]:
    values = {"cache_salt": SALT, "tier": ACME} | values
    tokens: list[int] = []
    last = EngineOutput((), "")
    async with asyncio.timeout(PATIENCE_S):
        async for last in engine.generate(
            EngineRequest(RequestId(f"r{next(_fresh)}"), prompt, GREEDY, **values)  # type: ignore[arg-type]
        ):
            tokens += last.token_ids
    return tokens, last


async def prefill(engine: Engine, prompt: Sequence[int], tier: TierHints) -> TransferParams:
    sampling = Sampling(max_tokens=1, temperature=0.0)
    request = EngineRequest(
        RequestId(f"r{next(_fresh)}"), prompt, sampling, keep_for_transfer=True, cache_salt=SALT, tier=tier
    )
    transfer = None
    async for output in engine.generate(request):
        transfer = output.transfer_params
    assert transfer is not None
    return transfer


def engine_of(path: Path, keeper: NodeProcess, *, producer: bool) -> VllmEngine:
    folder = str(path)
    model, engine = (
        model_config(path=folder, max_model_len=2048),
        engine_config(
            "prefill" if producer else "decode",
            max_num_batched_tokens=STEP_TOKENS,
            args={"num_gpu_blocks_override": NUM_BLOCKS, "seed": 7},
        ),
    )
    return VllmEngine(
        folder,
        model,
        engine,
        producer=producer,
        tier=keeper.config,
        keeper_socket=str(keeper.socket_path),
        has_tenants=True,
    )


def minus(after: CachedTokens, before: CachedTokens) -> CachedTokens:
    return CachedTokens(
        after.device - before.device,
        after.cpu - before.cpu,
        after.volume - before.volume,
        after.kv_transfer - before.kv_transfer,
    )


@dataclass
class World:
    model: Path
    keeper: NodeProcess
    decode: VllmEngine
    mirror: PageMirror
    registry: Path

    @property
    def volume(self) -> Path:
        return self.keeper.folder / "v0"

    def file_of(self, prompt: Sequence[int], page: int) -> Path:
        """Of a page of a prompt under SALT: the name ends with the route key."""
        key = route_keys(prompt, BLOCK_SIZE, seed_of(SALT))[page]
        (file,) = (file for file in chunk_files(self.volume) if file.stem.endswith(f"-{key:016x}"))
        return file

    def has_kept(self, prompt: Sequence[int], salt: str) -> bool:
        """Whether all pages of a prompt lie on the volume."""
        names = {file.stem[-16:] for file in chunk_files(self.volume)}
        return names.issuperset(f"{key:016x}" for key in route_keys(prompt, BLOCK_SIZE, seed_of(salt)))

    async def expected(self, prompt: Sequence[int]) -> list[int]:
        """The answer of an engine that has nothing of the prompt."""
        tokens, last = await run(self.decode, prompt, cache_salt=f"nobody's {next(_fresh)}", tier=None)
        assert last.sources == PromptSources(local_compute=len(prompt))
        return tokens

    def bytes_read(self) -> int:
        """What the keeper has read from its drive."""
        return int(psutil.Process(self.keeper.pid).io_counters().read_bytes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("tier", numbered=True)
    (registry := folder / "registry").mkdir()
    keeper = NodeProcess(folder / "here", registry, "here", **{**OPTIONS, "volume": SMALL_VOLUME, "tenants": TENANTS})
    keeper.start()
    model = make_model("large-pages", folder / "model")
    first = engine_of(model, keeper, producer=True)
    try:
        await first.start()
        for i in range(NUM_PROMPTS):
            sampling = Sampling(max_tokens=1, temperature=0.0)
            request = EngineRequest(RequestId(f"first-{i}"), prompt_of(i), sampling, cache_salt=SALT, tier=ACME)
            async for _ in first.generate(request):
                pass
        await until(lambda: len(chunk_files(keeper.folder / "v0")) == NUM_PROMPTS * NUM_PAGES, what="pages kept")
    finally:
        await first.stop()
    decode = engine_of(model, keeper, producer=False)
    mirror = PageMirror(BLOCK_SIZE, 10_000)

    async def listen() -> None:
        async for batch in decode.kv_events():
            mirror.apply(batch)

    try:
        await decode.start()
        listening = asyncio.create_task(listen())
        yield World(model, keeper, decode, mirror, registry)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    finally:
        await decode.stop()
        keeper.reap()


async def test_after_all_engines_ended_a_prompt_comes_from_the_volume(world: World) -> None:
    prompt = prompt_of(0)
    expected = await world.expected(prompt)
    before = world.decode.stats().cached_tokens
    tokens, last = await run(world.decode, prompt)
    assert tokens == expected
    cached = minus(world.decode.stats().cached_tokens, before)
    assert cached == CachedTokens(volume=NUM_PAGES * BLOCK_SIZE)
    assert cached.volume >= 0.95 * len(prompt)
    assert last.sources == PromptSources(len(prompt) - cached.volume, 0, cached.volume)
    assert last.cached == cached
    # How long it waited for them is known, and stays in this process.
    assert last.transfer_params is None
    times = last.times
    assert times is not None
    assert times.kv_transfer is None
    assert times.load is not None
    assert times.queued_s <= times.load[0] < times.load[1] <= times.scheduled_s <= times.first_token_s
    # Gateways hear that it is in this engine's memory, and in its CPU tier.
    keys = set(route_keys(prompt, BLOCK_SIZE, seed_of(SALT)))
    await until(lambda: keys <= world.mirror.keys_of(Tier.GPU) and keys <= world.mirror.keys_of(Tier.CPU))


async def test_pages_lie_under_their_tenant(world: World) -> None:
    assert world.file_of(prompt_of(0), 3).parent.parent.name == "acme.3"


async def test_a_corrupted_page_is_computed_and_put_aside(world: World) -> None:
    prompt = prompt_of(1)
    expected = await world.expected(prompt)
    file = world.file_of(prompt, 7)
    content = bytearray(file.read_bytes())
    content[4096 + 1000] ^= 1
    file.write_bytes(content)
    before = world.decode.stats().cached_tokens
    tokens, last = await run(world.decode, prompt)
    assert tokens == expected
    assert minus(world.decode.stats().cached_tokens, before) == CachedTokens(volume=7 * BLOCK_SIZE)
    assert last.sources == PromptSources(len(prompt) - 7 * BLOCK_SIZE, 0, 7 * BLOCK_SIZE)
    assert len(list((world.volume / "quarantine").iterdir())) == 1
    # Computed, it is kept anew.
    await until(lambda: file.exists() and file.stat().st_size == len(content), what="the page again")


async def test_answers_are_kept_and_the_cpu_tier_has_what_the_engine_gave_away(world: World) -> None:
    prompt = prompt_of(0)
    answer, _ = await run(world.decode, prompt)
    whole = [*prompt, *answer, *prompt_of(77)[:20]]
    expected = await world.expected(whole)
    first, _ = await run(world.decode, whole)
    assert first == expected
    assert await world.decode._llm.reset_prefix_cache()
    before = world.decode.stats().cached_tokens
    again, last = await run(world.decode, whole)
    assert again == expected
    num_cached = len(whole) // BLOCK_SIZE * BLOCK_SIZE
    assert num_cached > NUM_PAGES * BLOCK_SIZE
    assert minus(world.decode.stats().cached_tokens, before) == last.cached == CachedTokens(cpu=num_cached)
    assert last.sources == PromptSources(len(whole) - num_cached, 0, num_cached)


@dataclass
class Elsewhere:
    """Another node: its own keeper and volume, and an engine that knows neither the prompts nor the other engines."""

    keeper: NodeProcess
    prefill: VllmEngine
    hints: TierHints  # where the prompts lie: on the volume of the first node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elsewhere(world: World, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Elsewhere]:
    keeper = NodeProcess(tmp_path_factory.mktemp("elsewhere"), world.registry, "elsewhere", **OPTIONS)
    keeper.start()
    engine = engine_of(world.model, keeper, producer=True)
    try:
        await engine.start()
        yield Elsewhere(keeper, engine, TierHints(ACME.namespace, volumes={world.keeper.volume_id: NUM_PAGES}))
    finally:
        await engine.stop()
        keeper.reap()


async def test_pages_of_another_nodes_volume_come_through_its_keeper(world: World, elsewhere: Elsewhere) -> None:
    """By NIXL: these keepers share no folder, and a gRPC message of theirs carries no page."""
    prompt = prompt_of(7)
    expected = await world.expected(prompt)
    assert chunk_files(elsewhere.keeper.folder / "v0") == []
    read = world.bytes_read()
    tokens, last = await run(elsewhere.prefill, prompt, tier=elsewhere.hints)
    assert tokens == expected
    num_loaded = NUM_PAGES * BLOCK_SIZE
    assert num_loaded >= 0.95 * len(prompt)
    assert elsewhere.prefill.stats().cached_tokens == CachedTokens(volume=num_loaded)
    assert last.sources == PromptSources(len(prompt) - num_loaded, 0, num_loaded)
    # Direct, from the drive of the keeper that has them.
    assert world.bytes_read() - read >= NUM_PAGES * elsewhere.prefill.info.page_bytes


async def test_what_is_ferried_is_not_read_from_the_volume_as_well(world: World, elsewhere: Elsewhere) -> None:
    """All fixes of the KV transfer hold beside a tier too."""
    prompt, other = prompt_of(2), prompt_of(3)
    expected, expected_other = await world.expected(prompt), await world.expected(other)
    prefilling = elsewhere.prefill
    before = prefilling.stats().cached_tokens
    transfer = await prefill(prefilling, prompt, elsewhere.hints)
    assert minus(prefilling.stats().cached_tokens, before) == CachedTokens(volume=NUM_PAGES * BLOCK_SIZE)
    assert "remote_blocks_expiry_time" in transfer  # nixl_lease.py
    read, before = world.bytes_read(), world.decode.stats().cached_tokens
    transferred_bytes = world.decode.stats().transferred_bytes
    tokens, last = await run(world.decode, prompt, transfer_params=transfer)
    assert tokens == expected
    assert last.sources == PromptSources(external_kv_transfer=len(prompt))
    times = last.times
    assert times is not None
    assert times.load is None
    assert times.kv_transfer is not None
    assert times.queued_s <= times.kv_transfer[0] < times.kv_transfer[1] <= times.scheduled_s
    assert minus(world.decode.stats().cached_tokens, before) == CachedTokens(kv_transfer=len(prompt))
    assert world.bytes_read() == read
    await until(
        lambda: (
            world.decode.stats().transferred_bytes - transferred_bytes == (NUM_PAGES + 1) * world.decode.info.page_bytes
        )
    )
    # When the KV transfer fails, the engine reads the volume.
    kept = await prefill(prefilling, other, elsewhere.hints)
    gone = {**kept, "remote_engine_id": "0" * 32, "remote_port": 1}
    before = world.decode.stats().cached_tokens
    tokens, last = await run(world.decode, other, transfer_params=gone)
    assert tokens == expected_other
    assert last.sources == PromptSources(len(other) - NUM_PAGES * BLOCK_SIZE, 0, NUM_PAGES * BLOCK_SIZE)
    assert minus(world.decode.stats().cached_tokens, before).volume == NUM_PAGES * BLOCK_SIZE
    # An engine that only keeps pages naps (cpu_device.py), until they are released (nixl_lease.py).
    steps, num_used = prefilling.stats().num_steps, prefilling.stats().num_pages_used
    assert num_used > NUM_PAGES
    await asyncio.sleep(1.0)  # the window of the measurement
    assert prefilling.stats().num_steps - steps < 150
    await prefilling.release(kept)
    await until(lambda: prefilling.stats().num_pages_used == 0)
    for engine in (world.decode, prefilling):
        assert os.sched_getaffinity(worker_of(engine).pid) == os.sched_getaffinity(0)  # nixl.py


async def test_floors_of_device_cpu_tier_and_volume_survive_a_flood_of_ten_times_each(
    world: World, elsewhere: Elsewhere
) -> None:
    plain, noise, small = TierTerms(cap=0.6), TierTerms(cap=1.0), TierTerms(floor=0.02, cap=0.6)
    others = {"moved": small, "plain": plain, "noise": noise}
    cpu, device = TierTerms(floor=0.5, cap=0.6), TierTerms(floor=0.25, cap=0.6)
    await world.decode.set_terms({"cpu": {"gold": cpu, **others}, "device": {"gold": device, **others}})
    hints = {name: TierHints(Namespace(name)) for name in ("gold", *others)}
    prompt = prompt_of(500)
    expected = await world.expected(prompt)
    assert world.decode.info.page_bytes == PAGE_BYTES
    # What other engines gave of their parts of this tenant's floors.
    moved = {"cpu": TierTerms(floor=0.4, cap=0.6), "device": TierTerms(floor=0.25, cap=0.6)}
    await world.decode.set_terms({tier: {"moved": terms} for tier, terms in moved.items()})
    for name in ("gold", "moved", "plain"):
        tokens, _ = await run(world.decode, prompt, cache_salt=name, tier=hints[name])
        assert tokens == expected
    for name in ("gold", "moved"):
        await until(lambda name=name: world.has_kept(prompt, name), what=f"pages of {name} on the volume")  # type: ignore[misc]
    num_pages = max(world.decode.info.num_pages, world.decode.info.num_cpu_pages, VOLUME_PAGES)
    one = Sampling(max_tokens=1, temperature=0.0)
    for i in range(10 * num_pages // NUM_PAGES + 1):
        request = EngineRequest(
            RequestId(f"noise-{i}"), prompt_of(1000 + i), one, cache_salt="noise", tier=hints["noise"]
        )
        async for _ in world.decode.generate(request):
            pass
    everything = NUM_PAGES * BLOCK_SIZE
    for name in ("gold", "moved"):
        tokens, last = await run(world.decode, prompt, cache_salt=name, tier=hints[name])
        assert (tokens, last.cached) == (expected, CachedTokens(device=everything)), name
    tokens, last = await run(world.decode, prompt, cache_salt="plain", tier=hints["plain"])
    assert (tokens, last.cached) == (expected, CachedTokens()), "without a floor all of it is gone"
    assert last.sources == PromptSources(local_compute=len(prompt))
    assert await world.decode._llm.reset_prefix_cache()
    for name in ("gold", "moved"):
        tokens, last = await run(world.decode, prompt, cache_salt=name, tier=hints[name])
        assert (tokens, last.cached) == (expected, CachedTokens(cpu=everything)), name
    await until(lambda: world.decode.tenant_usages()["device"]["moved"].floor == (NUM_BLOCKS - 1) // 4)
    # An engine of another node has them from the volume.
    for name in ("gold", "moved"):
        on_volume = TierHints(Namespace(name), volumes={world.keeper.volume_id: NUM_PAGES})
        tokens, last = await run(elsewhere.prefill, prompt, cache_salt=name, tier=on_volume)
        assert (tokens, last.cached) == (expected, CachedTokens(volume=everything)), name


def is_worker(process: psutil.Process) -> bool:
    try:
        # Without tensor parallelism, the engine core's process computes.
        return "VLLM::EngineCore" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


async def test_stopping_an_engine_that_was_killed_ends_its_requests(elsewhere: Elsewhere) -> None:
    engine, begun = elsewhere.prefill, asyncio.Event()
    worker = worker_of(engine)
    long = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)

    async def read() -> None:
        async for _ in engine.generate(EngineRequest(RequestId("stopped"), prompt_of(20), long)):
            begun.set()

    reading = asyncio.create_task(read())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        worker.kill()
        await engine.stop()  # at once: before vLLM's client has seen the death
        with pytest.raises(EngineDead):
            await reading
    with pytest.raises(EngineDead, match="stopped"):
        await run(engine, prompt_of(20))


async def test_a_prompt_that_is_due_first_passes_a_long_one_and_both_are_as_alone(world: World) -> None:
    chance = random.Random(77)
    long, short = ([chance.randrange(200, 40_000) for _ in range(num)] for num in (6 * STEP_TOKENS, 40))
    expected = [await world.expected(prompt) for prompt in (long, short)]
    first_s: dict[str, float] = {}

    async def answer(name: str, prompt: Sequence[int], due_ms: float) -> list[int]:
        tokens: list[int] = []
        request = EngineRequest(RequestId(name), prompt, GREEDY, cache_salt=name)
        async for output in world.decode.generate(request, due_ms=due_ms):
            first_s.setdefault(name, asyncio.get_running_loop().time())
            tokens += output.token_ids
        return tokens

    num_steps = world.decode.stats().num_steps
    answers = [asyncio.create_task(answer("long", long, 1000.0))]
    await until(lambda: world.decode.stats().num_steps > num_steps, what="a step of the long prompt")
    answers.append(asyncio.create_task(answer("short", short, 10.0)))
    assert await asyncio.gather(*answers) == expected
    assert first_s["short"] < first_s["long"], "it did not wait for the steps that the long one still had"


async def test_a_volume_that_hangs_holds_nobody_up_for_long(world: World) -> None:
    prompt = prompt_of(4)
    expected = await world.expected(prompt)
    world.keeper.stall()
    begun_s = asyncio.get_running_loop().time()
    tokens, last = await run(world.decode, prompt)
    took_s = asyncio.get_running_loop().time() - begun_s
    assert tokens == expected
    assert last.sources == PromptSources(local_compute=len(prompt))
    assert took_s < 30
    assert world.keeper.num_stalled > 0
    world.keeper.go_on()


async def test_a_keeper_that_is_killed_is_a_miss_and_comes_back(world: World) -> None:
    prompt, later = prompt_of(5), prompt_of(6)
    expected = await world.expected(later)
    world.keeper.kill()
    world.keeper.reap()
    tokens, last = await run(world.decode, prompt)
    assert last.sources == PromptSources(local_compute=len(prompt))
    world.keeper.start()
    # The engine finds it again by itself, and what it has.
    await until(lambda: world.keeper.maps(region_of(world.decode)), what="the engine at the keeper")
    tokens, last = await run(world.decode, later)
    assert tokens == expected
    assert last.sources == PromptSources(len(later) - NUM_PAGES * BLOCK_SIZE, 0, NUM_PAGES * BLOCK_SIZE)


def worker_of(engine: VllmEngine) -> psutil.Process:
    """The process that has the CPU tier of this engine mapped, and computes."""
    children = psutil.Process().children(recursive=True)
    (worker,) = (child for child in children if is_worker(child) and regions_of(child, engine))
    return worker


def core_of(engine: VllmEngine) -> int:
    """Return the process of the engine's scheduler."""
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    assert isinstance(core.pid, int)
    return core.pid


def regions_of(process: psutil.Process, engine: VllmEngine) -> set[int]:
    """The inodes of an engine's CPU tier that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if f"vllm_offload_{engine.info.engine_id}" in line}


def region_of(engine: VllmEngine) -> int:
    (inode,) = regions_of(worker_of(engine), engine)
    return inode


async def test_killing_an_engine_leaves_no_name_in_shared_memory(world: World) -> None:
    def names() -> list[str]:
        return [file.name for file in Path("/dev/shm").iterdir() if world.decode.info.engine_id in file.name]

    assert names() == []
    worker, inode = worker_of(world.decode), region_of(world.decode)
    assert worker.pid == core_of(world.decode)
    assert world.keeper.maps(inode)
    worker.kill()
    with pytest.raises(EngineDead):
        await run(world.decode, prompt_of(0))
    assert names() == []
    await until(lambda: not world.keeper.maps(inode), what="the keeper has let go of the region")
