"""One request's answer so far."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import structs

from kvferry.engine.base import Continued, EngineOutput, EngineRequest, RequestId
from kvferry.errors import EngineError
from kvferry.link.remote_request import OnOutput, OnText, as_on_text
from kvferry.router.request_record import RequestRecord

MAX_NOTED: Final = 64  # continuations that a record names


class AnswerSoFar:
    """Continues an answer whose worker was lost, or gave its slot to another tenant."""

    def __init__(
        self, request: EngineRequest, on_output: OnOutput, record: RequestRecord, on_text: OnText | None = None
    ) -> None:
        self.request_id = request.request_id
        self.token_ids: list[int] = []
        self.request = request
        self._deliver = on_output
        self._deliver_text = on_text if on_text is not None else as_on_text(on_output)
        self._record = record
        self._num_chars = 0
        self._sizes: list[int] | None = [] if request.parse is not None else None  # tokens of each output
        self._attempt = 0
        self._on_first_output: Callable[[], None] | None = None

    def begin_attempt(self, on_first_output: Callable[[], None]) -> None:
        """`on_first_output` is called once, before the first output is delivered."""
        self._on_first_output = on_first_output

    def end_attempt(self) -> None:
        """Drop the callback, which may refer back to this answer: a cycle would keep the prompt."""
        self._on_first_output = None

    def next_request(self) -> EngineRequest:
        """Return it with a new id: the lost worker may know the old one.

        Raises EngineError for an answer that has all its tokens and did not end.
        """
        request, given = self.request, self.token_ids
        if not given:
            return request
        if len(given) >= request.sampling.max_tokens:
            raise EngineError("a worker gave all tokens of the answer, and was lost before it told how it ended")
        self._attempt += 1
        noted = self._record.continued_after
        if noted[-1:] != [len(given)] and len(noted) < MAX_NOTED:
            noted.append(len(given))
        return structs.replace(
            request,
            request_id=RequestId(f"{request.request_id}-c{self._attempt}"),
            prompt_token_ids=array("I", [*request.prompt_token_ids, *given]),
            continued=Continued(len(given), self._num_chars, tuple(self._sizes or ())),
        )

    def on_output(self, output: EngineOutput) -> None:
        if self._on_first_output is not None:
            self._on_first_output()
            self._on_first_output = None
        self._note(output.token_ids, output.text)
        self._deliver(output)

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        if self._on_first_output is not None:
            self.on_output(EngineOutput(token_ids, text))
            return
        self._note(token_ids, text)
        self._deliver_text(token_ids, text)

    def _note(self, token_ids: Sequence[int], text: str) -> None:
        self.token_ids.extend(token_ids)
        self._num_chars += len(text)
        if self._sizes is not None and token_ids:
            self._sizes.append(len(token_ids))
