"""The read rate of a volume."""

from __future__ import annotations

import threading

# Weight of the last measurement in the rate.
_WEIGHT = 0.3
# A rate expires after this time without reads. A slow volume gets no loads, so its rate would never be measured again.
_EXPIRY_S = 5.0


class ReadRate:
    """Bytes per second while at least one read runs. Thread-safe."""

    def __init__(self, now_s: float) -> None:
        self._lock = threading.Lock()
        self._num_reading = 0
        self._since_s = 0.0
        self._busy_s = 0.0  # since the last measurement
        self._num_bytes = 0
        self._measured_at_s = now_s
        self.bytes_per_s = 0.0  # 0: nothing was read in the last seconds

    def __repr__(self) -> str:
        return f"<ReadRate {self.bytes_per_s:.0f} bytes/s>"

    def begin_read(self, now_s: float) -> None:
        with self._lock:
            if not self._num_reading:
                self._since_s = now_s
            self._num_reading += 1

    def end_read(self, num_bytes: int, now_s: float) -> None:
        with self._lock:
            self._num_reading -= 1
            self._num_bytes += num_bytes
            if not self._num_reading:
                self._busy_s += now_s - self._since_s

    def measure(self, now_s: float) -> None:
        """Update the rate from the reads since the last call; call about every second."""
        with self._lock:
            busy_s, num_bytes = self._busy_s, self._num_bytes
            if self._num_reading:
                busy_s += now_s - self._since_s
                self._since_s = now_s
            self._busy_s, self._num_bytes = 0.0, 0
        if num_bytes and busy_s > 0:
            weight = _WEIGHT if self.bytes_per_s else 1.0
            self.bytes_per_s += weight * (num_bytes / busy_s - self.bytes_per_s)
            self._measured_at_s = now_s
        elif now_s - self._measured_at_s > _EXPIRY_S:
            self.bytes_per_s = 0.0
