"""An engine's copy of the keys that its keeper can load."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.keeper import messages
from kvferry.keeper.messages import ProtocolError
from kvferry.store.layout import ChunkKey


class KeyMirror:
    def __init__(self) -> None:
        self.keys: set[ChunkKey] = set()
        self.is_complete = False
        self._sequence = 0
        self._next_part = 0

    def __repr__(self) -> str:
        return f"<KeyMirror of {len(self.keys)} keys at {self._sequence}>"

    def apply_part(self, message: messages.SnapshotKeys) -> None:
        """Raises ProtocolError for a part out of order."""
        if message.part == 0:
            self.keys, self.is_complete = set(), False
        elif self.is_complete or (message.sequence, message.part) != (self._sequence, self._next_part):
            raise ProtocolError(f"part {message.part} of keys after change {message.sequence}")
        self._sequence, self._next_part = message.sequence, message.part + 1
        self.keys.update(messages.unpack_chunk_keys(message.keys))
        self.is_complete = message.part + 1 == message.num_parts

    def apply_change(self, message: messages.ChangedKeys) -> None:
        """Raises ProtocolError for a change out of order."""
        if message.sequence != self._sequence + 1 or not self.is_complete:
            raise ProtocolError(f"change {message.sequence} after {self._sequence}")
        self._sequence = message.sequence
        self.discard(messages.unpack_chunk_keys(message.removed))
        self.keys.update(messages.unpack_chunk_keys(message.added))

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        self.keys.difference_update(keys)
