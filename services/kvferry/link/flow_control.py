"""Limits the messages and bytes that a worker sends ahead of a gateway.

Socket buffers are no measure: they vary and grow.
"""

from __future__ import annotations

# A worker sends while both counts are below these: 0.3 s of steps of 5 ms, more than fit in a round trip between
# machines. Without credit steps merge until the gateway has read more.
MAX_UNREAD_MESSAGES = 64
MAX_UNREAD_BYTES = 1 << 20

# A gateway acknowledges at the first of these. They are well below the limits above, or a link would come to rest.
ACK_EVERY_MESSAGES = 16
ACK_EVERY_BYTES = 256 << 10
# And at least this often: see SILENCE_LIMIT_S.
ACK_EVERY_S = 3.0

# An end from which nothing came for this long is lost, whatever its TCP says. A gateway sends at least every
# ACK_EVERY_S, a worker at every heartbeat (1 s); for a gateway the time begins with the first byte of a dial.
SILENCE_LIMIT_S = 15.0

# Three heartbeats: a request that has lost a worker is not given to one that may be lost too.
QUIET_S = 3.0


class Credit:
    """The worker's count of messages and bytes that the gateway has not acknowledged."""

    __slots__ = ("_num_bytes_read", "_num_bytes_sent", "_num_messages_read", "_num_messages_sent")

    def __init__(self) -> None:
        self._num_messages_sent = self._num_messages_read = 0
        self._num_bytes_sent = self._num_bytes_read = 0

    def __repr__(self) -> str:
        num_messages = self._num_messages_sent - self._num_messages_read
        return f"<Credit unread={num_messages} messages, {self._num_bytes_sent - self._num_bytes_read} bytes>"

    @property
    def is_left(self) -> bool:
        """One more message may be sent, of any size."""
        return (
            self._num_messages_sent - self._num_messages_read < MAX_UNREAD_MESSAGES
            and self._num_bytes_sent - self._num_bytes_read < MAX_UNREAD_BYTES
        )

    def spend(self, num_bytes: int) -> None:
        self._num_messages_sent += 1
        self._num_bytes_sent += num_bytes

    def restore(self, num_messages: int, num_bytes: int) -> None:
        """Set the totals that the gateway has read. Raises ValueError for decreasing or unsent counts."""
        if not (
            self._num_messages_read <= num_messages <= self._num_messages_sent
            and self._num_bytes_read <= num_bytes <= self._num_bytes_sent
        ):
            raise ValueError(f"an acknowledgement of {num_messages} messages and {num_bytes} bytes does not fit {self}")
        self._num_messages_read = num_messages
        self._num_bytes_read = num_bytes


class AckCounter:
    """The gateway's count of messages and bytes that it has read."""

    __slots__ = ("_num_bytes_acknowledged", "_num_messages_acknowledged", "num_bytes", "num_messages")

    def __init__(self) -> None:
        self.num_messages = self._num_messages_acknowledged = 0
        self.num_bytes = self._num_bytes_acknowledged = 0

    def count(self, num_bytes: int) -> bool:
        """Returns whether an acknowledgement is due."""
        self.num_messages += 1
        self.num_bytes += num_bytes
        return (
            self.num_messages - self._num_messages_acknowledged >= ACK_EVERY_MESSAGES
            or self.num_bytes - self._num_bytes_acknowledged >= ACK_EVERY_BYTES
        )

    def acknowledged(self) -> None:
        self._num_messages_acknowledged = self.num_messages
        self._num_bytes_acknowledged = self.num_bytes
