"""Records of the requests of a run. Times are seconds from the start of the run, of one monotonic clock."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvferry_loadtest.plan import RequestId


class Outcome(StrEnum):
    """How a request ended. All but OK are misses of any objective."""

    OK = "ok"
    REFUSED = "refused"  # 429 or 503: the server said that it would rather not
    FAILED = "failed"  # any other status, a broken connection, a stream that ended without its end
    TIMED_OUT = "timed_out"  # the harness gave up waiting
    SKIPPED = "skipped"  # never sent: what it follows did not end well, or the run was over


class Record(msgspec.Struct, kw_only=True):
    """One request. `due_s` is what an ideal client would have kept to; everything the server or the harness was late by
    lies behind it."""

    request_id: RequestId
    session_id: str
    turn: int
    tenant: str
    warmup: bool
    due_s: float  # when its schedule and its predecessors allowed it
    predecessor_wait_s: float  # how much later than its schedule its predecessors made it
    sent_s: float | None = None
    first_token_s: float | None = None
    token_s: list[float] = []  # arrival of every event with text, first one included
    end_s: float | None = None
    outcome: Outcome = Outcome.SKIPPED
    status: int | None = None  # HTTP's
    error: str = ""  # what went wrong, as the server or the transport put it; short
    prompt_tokens: int | None = None  # by the server's usage
    cached_tokens: int | None = None  # by the server's usage, where it says so
    completion_tokens: int | None = None  # by the server's usage
    finish_reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From when it was due. None without a first token."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def ttft_sent_s(self) -> float | None:
        return None if self.first_token_s is None or self.sent_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first. None with fewer than two tokens."""
        if self.first_token_s is None or self.end_s is None or (self.completion_tokens or 0) < 2:
            return None
        return (self.token_s[-1] - self.first_token_s) / ((self.completion_tokens or 0) - 1)

    @property
    def e2e_s(self) -> float | None:
        """From when it was due to its end. None when it did not end well."""
        return None if self.end_s is None or self.outcome is not Outcome.OK else self.end_s - self.due_s

    @property
    def e2e_sent_s(self) -> float | None:
        if self.end_s is None or self.sent_s is None or self.outcome is not Outcome.OK:
            return None
        return self.end_s - self.sent_s

    @property
    def lateness_s(self) -> float | None:
        """How much later than due the harness sent it: its own doing."""
        return None if self.sent_s is None else self.sent_s - self.due_s
