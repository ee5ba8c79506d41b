"""Attacks of one tenant on the others of a cluster: what its clients send, and how that was answered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench import abuse_bodies as bodies
from bench.abuse_bodies import Body
from bench.gateway import say, told_to_end
from bench.raw_http import Connection, post_head, post_request

PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
NICENESS = 19

MOST_CHOICES = 512  # of a request
# Half of a gateway's 1,024 minus room for what others have in flight: of more than is left for others none is admitted.
ADMITTED_CHOICES = 448
FLOOD_CONNECTIONS = 64
LONG_CONNECTIONS = 96  # more than its limit of choices
LONG_LIMITS = {"tokens_per_minute": 1_200_000.0, "max_choices": 64}
STREAM_CONNECTIONS = 80  # of each kind: together more than the slots of two decode workers
GRAMMAR_CONNECTIONS = 48  # of each kind: together more than have turns and wait at a gateway
IMAGE_CONNECTIONS = 96
TEXT_CONNECTIONS = 128
RETRY_S = 1.0  # as Retry-After asks for: more often would be a flood of bodies, which is another attack
TRICKLES = 1024
TRICKLE_BYTE_S = 1.0  # between two bytes of a connection
TRICKLE_BODY_BYTES = 4096


@dataclass(frozen=True)
class Loop:
    """Connections that each send one request after the other, to the gateways in turn."""

    label: str
    num_connections: int
    body: Body
    pause_s: float = 0.0  # after a refusal


@dataclass(frozen=True)
class Attack:
    """Abuse by one tenant during a whole window, and the load of an innocent tenant meanwhile.

    `limits` are those that its operator has set. Those that `needs_renderer` are for lines of the real renderer.
    """

    shown: str
    loops: Sequence[Loop] = ()
    num_trickles: int = 0
    limits: Mapping[str, float | None] = field(default_factory=dict)
    path: str = PATH  # of all their requests
    innocent: Body = bodies.short
    # Load of the innocent tenant: 4 of the 128 streams of two decode workers, or a fraction of one turn in a queue.
    rate_per_s: float = 20.0
    needs_renderer: bool = False


ATTACKS: Mapping[str, Attack] = {
    "choices": Attack(
        f"requests of {ADMITTED_CHOICES} and {MOST_CHOICES} choices",
        [
            Loop(f"{ADMITTED_CHOICES} choices", 2, bodies.choices(ADMITTED_CHOICES), 0.05),
            Loop(f"{MOST_CHOICES} choices", 2, bodies.choices(MOST_CHOICES), 0.05),
            Loop(f"n={MOST_CHOICES}", 2, bodies.one_prompt(MOST_CHOICES), 0.05),
        ],
    ),
    "trickle": Attack(f"{TRICKLES:,} bodies, a byte each {TRICKLE_BYTE_S:g} s", num_trickles=TRICKLES),
    "flood": Attack(
        f"small requests over {FLOOD_CONNECTIONS} connections",
        [Loop("small", FLOOD_CONNECTIONS, bodies.tiny)],
    ),
    "long": Attack(
        f"{bodies.LONG_PROMPT_TOKENS:,} tokens of prompt, {bodies.LONG_ANSWER_TOKENS} of answer, at its limit",
        [Loop("long", LONG_CONNECTIONS, bodies.long, 0.1)],
        limits=LONG_LIMITS,
    ),
    "streams": Attack(
        f"{2 * STREAM_CONNECTIONS} streams of {bodies.STREAM_TOKENS:,} tokens with a seed or a penalty",
        [
            Loop("seed", STREAM_CONNECTIONS, bodies.seeded_stream, 0.1),
            Loop("penalty", STREAM_CONNECTIONS, bodies.penalized_stream, 0.1),
        ],
        innocent=bodies.stream,
    ),
    "grammars": Attack(
        f"costly grammars, each another one, over {2 * GRAMMAR_CONNECTIONS} connections",
        [
            Loop("refused grammar", GRAMMAR_CONNECTIONS, bodies.many_patterns, RETRY_S),
            Loop("grammar", GRAMMAR_CONNECTIONS, bodies.many_objects, RETRY_S),
        ],
        innocent=bodies.small_grammar,
        rate_per_s=3.0,
        needs_renderer=True,
    ),
    "images": Attack(
        f"images of {bodies.HOSTILE_IMAGE_PIXELS:,}^2 pixels, each with a salt, over {IMAGE_CONNECTIONS} connections",
        [Loop("image", IMAGE_CONNECTIONS, bodies.hostile_image, RETRY_S)],
        path=CHAT_PATH,
        innocent=bodies.small_image,
        rate_per_s=1.5,
        needs_renderer=True,
    ),
    "rendering": Attack(
        f"texts that do not fit into {bodies.CONTEXT:,} tokens over {TEXT_CONNECTIONS} connections",
        [Loop("text", TEXT_CONNECTIONS, bodies.hostile_text, RETRY_S)],
        innocent=bodies.text,
        rate_per_s=5.0,
        needs_renderer=True,
    ),
}


class Attacker:
    """Runs one attack until cancelled. `counts` are of what was sent by label: `sent`, answers by status, `lost`."""

    def __init__(self, attack: Attack, ports: Sequence[int], key: str) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._attack = attack
        self._ports = ports
        self._key = key

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for loop in self._attack.loops:
                counts, numbers = self.counts.setdefault(loop.label, Counter()), itertools.count()
                for _, port in zip(range(loop.num_connections), itertools.cycle(self._ports), strict=False):
                    tasks.create_task(self._repeat(loop, port, counts, numbers))
            if self._attack.num_trickles:
                tasks.create_task(self._trickle())

    async def _repeat(self, loop: Loop, port: int, counts: Counter[str], numbers: itertools.count[int]) -> None:
        with contextlib.closing(Connection(port)) as connection:
            while True:
                request = post_request(port, self._attack.path, self._key, loop.body(next(numbers)))
                counts["sent"] += 1
                try:
                    status = (await connection.exchange(request)).status
                except (OSError, EOFError):
                    counts["lost"] += 1
                    await asyncio.sleep(0.1)
                else:
                    counts[str(status)] += 1
                    if status != 200 and loop.pause_s:
                        await asyncio.sleep(loop.pause_s)

    async def _trickle(self) -> None:
        """Send a byte over each connection in turn, evenly spread over time."""
        counts = self.counts.setdefault("bodies", Counter())
        ports = itertools.cycle(self._ports)
        trickles = [Trickle(next(ports), self._key, counts) for _ in range(self._attack.num_trickles)]
        await asyncio.gather(*(trickle.open() for trickle in trickles))
        due_s = time.monotonic()
        for trickle in itertools.cycle(trickles):
            due_s += TRICKLE_BYTE_S / len(trickles)
            if (early_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
            await trickle.send_byte()


class Trickle(asyncio.Protocol):
    """A connection whose body comes byte by byte; where it is closed another one is opened."""

    def __init__(self, port: int, key: str, counts: Counter[str]) -> None:
        self._port = port
        self._key = key
        self._counts = counts
        self._transport: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        except OSError:
            self._counts["lost"] += 1
            return
        self._counts["sent"] += 1
        self._transport = transport
        transport.write(post_head(self._port, PATH, self._key, TRICKLE_BODY_BYTES))

    async def send_byte(self) -> None:
        if self._transport is None:
            await self.open()
        else:
            self._counts["bytes"] += 1
            self._transport.write(b" ")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 "):
            self._counts[data.split(b" ", 2)[1].decode()] += 1
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None


async def run_attack(name: str, ports: Sequence[int], key: str) -> None:
    """Attack at the lowest priority until this process is told to end; then say what was sent and answered."""
    os.nice(NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacker = Attacker(ATTACKS[name], ports, key)
    attacking = asyncio.create_task(attacker.run())
    ending = asyncio.create_task(told_to_end())
    say({"attack": name})
    await asyncio.wait((attacking, ending), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    attacking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await attacking  # an attack that failed is no result
    say(attacker.counts)
