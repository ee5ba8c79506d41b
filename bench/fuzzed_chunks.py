"""Chunks that fuzzers of the tier write and damage, and the count of what became of them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kvferry.keeper.layout import ChunkId, ChunkLayout
from kvferry.tenancy.namespace import Namespace

NAMESPACES = tuple(Namespace(tenant, epoch) for tenant in ("acme", "umbrella") for epoch in (1, 2))
SMALL = ChunkLayout("llama", "main", "x", "bfloat16", "auto", 16, 4, 8, 8, 64, "avx512", 1, 1, "NHD", 8192)


@dataclass(slots=True)
class Tally:
    """Mutations and their outcomes."""

    by_cause: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    num_mutations: int = 0
    last: str = ""  # cause and outcome
    num_wrong_chunks: int = 0
    num_destroyed_chunks: int = 0
    num_over_capacity: int = 0
    crashes: list[str] = field(default_factory=list)

    def count(self, cause: str, outcome: str) -> None:
        self.by_cause[cause][outcome] += 1
        self.num_mutations += 1
        self.last = f"{cause}: {outcome}"

    def finding(self) -> str:
        """Return what was wrong so far, with the last mutation; empty if nothing was."""
        counts = {
            "wrong pages delivered": self.num_wrong_chunks,
            "good pages destroyed": self.num_destroyed_chunks,
            "times over capacity": self.num_over_capacity,
            "crashes": len(self.crashes),
        }
        found = [f"{count} {what}" for what, count in counts.items() if count]
        if not found:
            return ""
        return f"{', '.join(found)} after mutation {self.num_mutations} ({self.last})" + "".join(
            f"\n{crash}" for crash in self.crashes[:1]
        )


def truth(layout: ChunkLayout, chunk: ChunkId) -> bytes:
    """Return a chunk's payload, derived from its identity: no two chunks share one."""
    return random.Random(f"{chunk.key.hex()} {layout.digest.hex()} {chunk.namespace}").randbytes(layout.payload_bytes)
