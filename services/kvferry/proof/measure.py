"""Asks two engines for the answers that `verdict.py` compares."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from kvferry.engine.base import NO_SOURCES, EngineOutput, EngineRequest, RequestId, Sampling
from kvferry.proof.verdict import Distances, Logprobs, View, distance, wrong_prompts

NUM_LOGPROBS = 20
_PROMPT_ONLY = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
_TOKEN = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=NUM_LOGPROBS)


class NotComparable(Exception):
    """The engines did other things than were asked for, so distances would say nothing."""


@dataclass(frozen=True, slots=True)
class Answered:
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs]
    last: EngineOutput


Ask = Callable[[EngineRequest], Awaitable[Answered]]


def answered(request: EngineRequest, outputs: Sequence[EngineOutput]) -> Answered:
    """`outputs` are all those of the request. Raises NotComparable where log-probabilities are missing."""
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [
        {each.token_id: each.logprob for each in position} for output in outputs for position in output.logprobs or ()
    ]
    if request.sampling.logprobs and not len(tokens) == len(logprobs) == request.sampling.max_tokens:
        raise NotComparable(
            f"an engine answered {len(tokens)} tokens and {len(logprobs)} log-probabilities where "
            f"{request.sampling.max_tokens} were asked for"
        )
    return Answered(tokens, logprobs, outputs[-1])


@dataclass(frozen=True, slots=True)
class _Views:
    answers: Mapping[View, Logprobs]
    num_held: int  # tokens of the prompt in whole pages that the engine held


class Measurement:
    def __init__(
        self,
        prefill: Ask,
        decode: Ask,
        *,
        block_size: int,
        tokens: Sequence[int],
        name: str,
        pool: str = "",
        adapter: str = "",
    ) -> None:
        """`name` begins request ids and cache salts. `tokens` replace others in wrong prompts."""
        self._prefill, self._decode = prefill, decode
        self._block_size, self._tokens = block_size, tokens
        self._name, self._pool, self._adapter = name, pool, adapter
        self._numbers = itertools.count()

    async def distances(self, number: int, prompt: Sequence[int]) -> list[Distances]:
        """Raises the engines' errors, and NotComparable."""
        own = await self._own(prompt, f"{number}-own")
        noise = await self._cut_elsewhere(prompt, f"{number}-cut")
        wrong = wrong_prompts(prompt, self._block_size, self._tokens, number)
        transferred, *controls = [
            await self._transferred(prompt, each, f"{number}-transferred-{place}", has_prefix=number % 2 == 1)
            for place, each in enumerate([prompt, *wrong])
        ]

        def compared(view: View) -> Distances:
            right = [own.answers[view]]
            return Distances(
                number,
                len(prompt),
                view,
                distance(right, [transferred.answers[view]]),
                distance(right, [noise.answers[view]]),
                tuple(distance(right, [control.answers[view]]) for control in controls),
            )

        of_own = {each.num_held for each in (own, noise)}
        of_transferred = {each.num_held for each in (transferred, *controls)}
        # Engines with recurrent layers keep less of what is transferred: they have the last state alone.
        if not own.num_held or (len(of_own) == len(of_transferred) == 1 and of_own != of_transferred):
            return [compared(View.DIRECT)]
        if len(of_own | of_transferred) > 1:
            raise NotComparable(
                f"the decode engine held {sorted(of_transferred)} tokens of transferred pages where it held "
                f"{sorted(of_own)} of its own; it may have been too busy to keep them"
            )
        # At a page's end there is no partial page, and the first position of the held view is the direct one.
        is_whole = (len(prompt) - 1) % self._block_size == 0
        return [compared(view) for view in View if view is View.HELD or not is_whole]

    async def _own(self, prompt: Sequence[int], salt: str) -> _Views:
        # As after a transfer, the last token of the prompt is computed alone, from pages with all tokens before it.
        sampling = structs.replace(_TOKEN, max_tokens=2, allowed_token_ids=(prompt[-1],))
        alone = await self._decode(self._request(prompt[:-1], sampling, f"{salt}-alone"))
        await self._decode(self._request(prompt, _PROMPT_ONLY, salt))
        return await self._views(prompt, alone.logprobs[1], salt)

    async def _cut_elsewhere(self, prompt: Sequence[int], salt: str) -> _Views:
        for cut in (len(prompt) // 3, len(prompt) // 2 + 1):
            await self._decode(self._request(prompt[: max(1, cut)], _PROMPT_ONLY, salt))
        answer = await self._decode(self._request(prompt, _TOKEN, salt))
        return await self._views(prompt, answer.logprobs[0], salt)

    async def _transferred(
        self, prompt: Sequence[int], computed: Sequence[int], salt: str, *, has_prefix: bool
    ) -> _Views:
        """The pages are those of `computed`, a prompt of the same length."""
        if has_prefix:  # both engines hold half of the prompt, as in a chat
            half = len(prompt) // 2
            await self._prefill(self._request(computed[:half], _PROMPT_ONLY, salt, keep_for_transfer=True))
            await self._decode(self._request(prompt[:half], _PROMPT_ONLY, salt))
        kept = await self._prefill(self._request(computed, _PROMPT_ONLY, salt, keep_for_transfer=True))
        if kept.last.transfer_params is None:
            raise NotComparable("the prefill engine kept no pages")
        # Where this fails, the lease frees the pages.
        answer = await self._decode(self._request(prompt, _TOKEN, salt, transfer_params=kept.last.transfer_params))
        sources = answer.last.sources or NO_SOURCES
        if not sources.external_kv_transfer:
            raise NotComparable("no pages came to the decode engine: it computed the prompt itself")
        return await self._views(prompt, answer.logprobs[0], salt)

    async def _views(self, prompt: Sequence[int], direct: Logprobs, salt: str) -> _Views:
        if len(prompt) <= self._block_size:
            return _Views({View.DIRECT: direct}, 0)
        held = await self._decode(self._request(prompt, _TOKEN, salt))
        num_held = (held.last.sources or NO_SOURCES).local_cache_hit
        return _Views({View.DIRECT: direct, View.HELD: held.logprobs[0]}, num_held)

    def _request(self, tokens: Sequence[int], sampling: Sampling, salt: str, **transfer: Any) -> EngineRequest:
        request_id, salt = RequestId(f"{self._name}-{next(self._numbers)}"), f"{self._name}-{salt}"
        plain = EngineRequest(request_id, tokens, sampling, cache_salt=salt, pool=self._pool, adapter=self._adapter)
        return structs.replace(plain, **transfer)
