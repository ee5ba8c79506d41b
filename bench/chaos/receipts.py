"""Receipts of clients: for each HTTP request, what it asked for and got."""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field


class Ending(enum.StrEnum):
    """How a client's request ended, as the client saw it."""

    WHOLE = "whole"  # all of the answer, up to its end
    CUT = "cut"  # the connection broke
    LEFT = "left"  # the client closed the connection
    REFUSED = "refused"  # 429
    FAILED = "failed"  # any other status, or an error in the stream


@dataclass(slots=True)
class Receipt:
    """Tokens are those that the client received."""

    tenant: str
    url: str  # of the gateway
    begun_s: float = field(default_factory=time.time)  # since the epoch, as all times here
    ended_s: float = 0.0
    ending: Ending = Ending.CUT
    answer_id: str = ""  # empty where no headers came
    num_prompt_tokens: int = 0  # as the answer's usage says; 0 unless it is whole
    num_generated: int = 0  # as the answer's usage says; 0 unless it is whole
    token_times_s: array[float] = field(default_factory=lambda: array("d"))

    def end(self, ending: Ending) -> None:
        self.ended_s, self.ending = time.time(), ending
