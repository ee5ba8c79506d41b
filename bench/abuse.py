"""One tenant's abuse of a gateway, in a process of its own: sends until it is ended, and prints what was answered.

Run by `bench.isolation`: python -m bench.abuse KIND HOST:PORT MODEL, with the key in KVFERRY_API_KEY. The last line on
stdout is a JSON object of counts by status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

NUM_FLOODING: Final = 64
NUM_TRICKLING: Final = 1024
NUM_LONG: Final = 16
BYTE_PAUSE_S: Final = 0.5
NUM_CHOICES: Final = 128  # of each prompt
NUM_PROMPTS: Final = 4
_NICE: Final = 10


class Sender:
    def __init__(self, address: str, model: str, key: str) -> None:
        self.counts: Counter[str] = Counter()
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._model = model
        self._key = key

    async def flood(self) -> None:
        """Small requests, each connection's after its last."""
        await _together(NUM_FLOODING, lambda: self._repeat(["hello"], 1, 1))

    async def long(self) -> None:
        """Long prompts and long answers."""
        await _together(NUM_LONG, lambda: self._repeat(["word " * 4000], 400, 1))

    async def choices(self) -> None:
        """One request of 512 choices, the most that are allowed, after the other."""
        await self._repeat([f"hello {i}" for i in range(NUM_PROMPTS)], 16, NUM_CHOICES)

    async def refused(self) -> None:
        """Requests of one choice more than is allowed."""
        await self._repeat(["hello"], 16, NUM_CHOICES + 1)

    async def trickle(self) -> None:
        """Bodies of which a byte comes now and then."""
        await _together(NUM_TRICKLING, self._trickle)

    async def _repeat(self, prompts: list[str], max_tokens: int, num_choices: int) -> None:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompts,
                "max_tokens": max_tokens,
                "n": num_choices,
                "temperature": 1 if num_choices > 1 else 0,
                "ignore_eos": True,
            }
        ).encode()
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    while True:
                        writer.write(self._head(len(body)) + body)
                        self.counts[await _answered(reader)] += 1
                finally:
                    writer.close()
            self.counts["closed"] += 1
            await asyncio.sleep(0.01)

    async def _trickle(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                reading = asyncio.create_task(_answered(reader))
                try:
                    writer.write(self._head(1 << 16))
                    while not reading.done():
                        writer.write(b" ")
                        self.counts["bytes"] += 1
                        await asyncio.wait([reading], timeout=BYTE_PAUSE_S)
                finally:
                    writer.close()
                    reading.cancel()
                    (status,) = await asyncio.gather(reading, return_exceptions=True)
                    if isinstance(status, str):
                        self.counts[status] += 1
            self.counts["closed"] += 1
            await asyncio.sleep(0.1)

    def _head(self, num_bytes: int) -> bytes:
        return (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {num_bytes}\r\n\r\n"
        ).encode()


KINDS: Final[Mapping[str, Callable[[Sender], Awaitable[None]]]] = {
    "choices": Sender.choices,
    "refused": Sender.refused,
    "trickle": Sender.trickle,
    "flood": Sender.flood,
    "long": Sender.long,
}


async def _answered(reader: asyncio.StreamReader) -> str:
    """Read an answer of known length. Return its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    lengths = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
    await reader.readexactly(int(lengths[0]))
    return status.split(" ")[1]


async def _together(number: int, run: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(number):
            tasks.create_task(_awaited(run))


async def _awaited(run: Callable[[], Awaitable[None]]) -> None:
    await run()


async def send(kind: str, sender: Sender) -> None:
    sending = asyncio.ensure_future(KINDS[kind](sender))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sending.cancel)
    print("begun", flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await sending


def main() -> int:
    kind, address, model = sys.argv[1:]
    # The attacker stands for another machine: what its own client computes is no harm that the service does.
    os.nice(_NICE)
    sender = Sender(address, model, os.environ["KVFERRY_API_KEY"])
    asyncio.run(send(kind, sender))
    print(json.dumps(dict(sorted(sender.counts.items()))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
