"""A process that writes, reads and removes chunks of a volume until it is killed, or for a while.

    python tier_writer.py PATH WRITER CAPACITY-PAGES SHARED(0|1) SEED STEPS(0: until killed)

Prints `ready` when the volume is open. At the end it prints the counts of its reads as JSON, waits for the end of its
input, so that no other process uses the volume, and checks the volume's invariants. Exits with 3 after a wrong byte.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

from kvferry_keeper.store.volume import Outcome, Volume
from support.tier_chunks import CHUNK_BYTES, LAYOUT, chunk, empty, payload, truth

NUM_CHUNKS = 24


def main(path: str, writer: str, capacity: str, shared: str, seed: str, steps: str) -> int:
    volume = Volume(Path(path), capacity_bytes=int(capacity) * CHUNK_BYTES, writer=writer, shared=shared == "1")
    volume.open()
    print("ready", flush=True)
    seeded = random.Random(int(seed))
    into = empty()
    outcomes: Counter[str] = Counter()
    step = 0
    while steps == "0" or step < int(steps):
        step += 1
        of = chunk(seeded.randrange(NUM_CHUNKS))
        match seeded.randrange(10):
            case 0:
                volume.remove(LAYOUT.digest, of)
            case 1 if shared == "1" and step % 10 == 0:
                volume.rescan()
            case 2 | 3 | 4 | 5:
                volume.write(LAYOUT.digest, of, payload(of))
            case _:
                outcome = volume.read(LAYOUT.digest, of, into)
                outcomes[outcome] += 1
                if outcome is Outcome.OK and bytes(into) != truth(of):
                    print(f"a wrong byte in {of}", file=sys.stderr)
                    return 3
    print(json.dumps(outcomes), flush=True)
    sys.stdin.read()
    volume.rescan()
    volume.check()
    volume.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
