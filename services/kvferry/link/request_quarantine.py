"""Digests of requests under which engines were lost, for a time. Pure, with passed time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from kvferry.wire.v1 import worker_pb2 as pb

# Gateways refuse them. Each gateway tells its workers, which tell their other gateways: that needs no registry, and
# both ends of a link have the same few entries.

QUARANTINE_S = 300.0
MAX_QUARANTINED = 1024  # the latest are kept
DIGEST_BYTES = 32


class Quarantine:
    """The latest MAX_QUARANTINED digests, each for at most QUARANTINE_S."""

    def __init__(self) -> None:
        self._digest_to_end_s: OrderedDict[bytes, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Quarantine of {len(self._digest_to_end_s)}>"

    def __len__(self) -> int:
        return len(self._digest_to_end_s)

    def add(self, digest: bytes, now_s: float, left_s: float = QUARANTINE_S) -> None:
        self._digest_to_end_s[digest] = now_s + min(left_s, QUARANTINE_S)
        self._digest_to_end_s.move_to_end(digest)
        while len(self._digest_to_end_s) > MAX_QUARANTINED:
            self._digest_to_end_s.popitem(last=False)

    def contains(self, digest: bytes, now_s: float) -> bool:
        end_s = self._digest_to_end_s.get(digest)
        return end_s is not None and end_s > now_s

    def is_empty(self, now_s: float) -> bool:
        """Forget what ended, and return whether nothing is left."""
        for digest in [digest for digest, end_s in self._digest_to_end_s.items() if end_s <= now_s]:
            del self._digest_to_end_s[digest]
        return not self._digest_to_end_s

    def to_wire(self, now_s: float) -> pb.Quarantined | None:
        """Return all entries, or None without any."""
        if self.is_empty(now_s):
            return None
        return to_wire(self._digest_to_end_s, now_s)

    def add_from_wire(self, message: pb.Quarantined, now_s: float) -> pb.Quarantined | None:
        """Add entries. Return those that were not known, or None. Digests of another length are passed over."""
        new: dict[bytes, float] = {}
        for request in message.requests[:MAX_QUARANTINED]:
            if len(request.digest) == DIGEST_BYTES and not self.contains(request.digest, now_s):
                self.add(request.digest, now_s, request.left_ms / 1000.0)
                new[request.digest] = self._digest_to_end_s[request.digest]
        return to_wire(new, now_s) if new else None


def to_wire(digest_to_end_s: Mapping[bytes, float], now_s: float) -> pb.Quarantined:
    return pb.Quarantined(
        requests=[
            pb.QuarantinedRequest(digest=digest, left_ms=max(1, int((end_s - now_s) * 1000.0)))
            for digest, end_s in digest_to_end_s.items()
        ]
    )
