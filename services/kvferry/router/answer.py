"""One request's answer so far, and its continuation on another worker."""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import structs

from kvferry.engine.base import Continued, EngineOutput, EngineRequest, RequestId, Sampling
from kvferry.errors import EngineError
from kvferry.link.remote_request import OnOutput, OnText, as_on_text
from kvferry.router.request_record import RequestRecord


class AnswerSoFar:
    """Continues an answer whose worker was lost."""

    # Most requests continue from the tokens so far; engines replay them in a grammar. Greedy requests with penalties or
    # bad words, and grammars after reasoning or on workers that do not replay, are computed again, and repeated output
    # is left out. For sampled requests, earlier penalties become a bias, or where engines take none, as below.

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
        self._attempt = 0
        # Tokens and characters that the attempt repeats, and the position of the next repeated token.
        self._num_repeated = 0
        self._num_chars_repeated = 0
        self._position = 0
        self._on_first_output: Callable[[], None] | None = None

    def begin_attempt(self, on_first_output: Callable[[], None]) -> None:
        """`on_first_output` is called once, before the first output is delivered."""
        self._on_first_output = on_first_output

    def end_attempt(self) -> None:
        """Drop the callback, which may refer back to this answer: a cycle would keep the prompt."""
        self._on_first_output = None

    def next_request(self, workers_replay_grammars: Callable[[], bool] = lambda: True) -> EngineRequest:
        """Return it with a new id: the lost worker may know the old one."""
        request, given = self.request, self.token_ids
        if not given:
            return request
        self._attempt += 1
        if self._record.continued_after[-1:] != [len(given)]:
            self._record.continued_after.append(len(given))
        request_id = RequestId(f"{request.request_id}-c{self._attempt}")
        if _restarts(request, workers_replay_grammars):
            self._num_repeated, self._num_chars_repeated, self._position = len(given), self._num_chars, 0
            return self._from_prompt(request_id)
        # The engine must give at least one token, to say how the answer ended.
        num_tokens = min(len(given), request.sampling.max_tokens - 1)
        self._num_repeated, self._position = len(given) - num_tokens, num_tokens
        if not num_tokens:
            self._num_chars_repeated = self._num_chars
            return self._from_prompt(request_id)
        return structs.replace(
            request,
            request_id=request_id,
            prompt_token_ids=array("I", [*request.prompt_token_ids, *given[:num_tokens]]),
            sampling=_with_penalties_as_bias(given[:num_tokens], request.sampling),
            continued=Continued(num_tokens, self._num_chars),
        )

    def _from_prompt(self, request_id: RequestId) -> EngineRequest:
        parse = self.request.parse
        if parse is not None:
            parse = structs.replace(parse, num_tokens_before=len(self.token_ids), num_chars_before=self._num_chars)
        return structs.replace(self.request, request_id=request_id, parse=parse)

    def on_output(self, output: EngineOutput) -> None:
        if self._on_first_output is not None:
            self._on_first_output()
            self._on_first_output = None
        if self._num_repeated or self._num_chars_repeated:
            output = self._without_repeated(output)
        self.token_ids.extend(output.token_ids)
        self._num_chars += len(output.text)
        self._deliver(output)

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        if self._on_first_output is not None or self._num_repeated or self._num_chars_repeated:
            self.on_output(EngineOutput(token_ids, text))
            return
        self.token_ids.extend(token_ids)
        self._num_chars += len(text)
        self._deliver_text(token_ids, text)

    def _without_repeated(self, output: EngineOutput) -> EngineOutput:
        num_tokens = min(self._num_repeated, len(output.token_ids))
        repeated = list(output.token_ids[:num_tokens])
        if repeated != self.token_ids[self._position : self._position + num_tokens]:
            raise EngineError("the worker was lost and another one does not give the same answer again")
        self._num_repeated -= num_tokens
        self._position += num_tokens
        num_chars = min(self._num_chars_repeated, len(output.text))
        self._num_chars_repeated -= num_chars
        return structs.replace(
            output,
            token_ids=output.token_ids[num_tokens:],
            text=output.text[num_chars:],
            logprobs=output.logprobs[num_tokens:] if output.logprobs is not None else None,
        )


def _restarts(request: EngineRequest, workers_replay_grammars: Callable[[], bool]) -> bool:
    sampling = request.sampling
    reasons = request.parse is not None and request.parse.reasons
    if sampling.structured_outputs and (reasons or not workers_replay_grammars()):
        return True
    has_penalties = bool(sampling.presence_penalty or sampling.frequency_penalty)
    if has_penalties and not request.takes_bias:
        return True
    return sampling.temperature == 0 and (has_penalties or bool(sampling.bad_words))


def _with_penalties_as_bias(given: Sequence[int], sampling: Sampling) -> Sampling:
    """Exact for the frequency penalty; a repeated token pays its presence penalty twice."""
    if not (sampling.presence_penalty or sampling.frequency_penalty):
        return sampling
    bias = dict(sampling.logit_bias)
    for token_id, count in Counter(given).items():
        cost = sampling.presence_penalty + sampling.frequency_penalty * count
        bias[token_id] = bias.get(token_id, 0.0) - cost
    return structs.replace(sampling, logit_bias=bias)


def may_be_preempted(request: EngineRequest) -> bool:
    """A sampled answer with a seed would not be repeatable, and one that is computed again would cost too much."""
    sampling = request.sampling
    is_repeatable = sampling.seed is not None and sampling.temperature > 0
    return request.turn is not None and not is_repeatable and not _restarts(request, lambda: True)


def replayable(request: EngineRequest) -> EngineRequest:
    """Seed a sampled request that would be computed again, for repeatable answers."""
    sampling = request.sampling
    if (
        not (sampling.structured_outputs or _restarts(request, lambda: True))
        or sampling.seed is not None
        or sampling.temperature == 0
    ):
        return request
    return structs.replace(request, sampling=structs.replace(sampling, seed=secrets.randbits(63)))
