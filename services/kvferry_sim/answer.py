"""The simulator's model, and its parser. Each token is a hash of all tokens before it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from kvferry.engine.base import AnswerDelta, FinishReason, Parse, Sampling, TokenLogprob, ToolCallDelta
from kvferry.errors import ConfigError
from kvferry_sim.tokenizer import EOS, NUM_SPECIAL, NUM_WORDS, SimTokenizer

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NUM_CANDIDATES = 8


class Answer:
    __slots__ = (
        "_bad_words", "_chain", "_constrained", "_eos_below", "_held", "_late", "_lowest_visible", "_num_ahead",
        "_num_tokens", "_recent", "_sampling", "_stop_ids", "_texts", "finish_reason", "stop_reason", "text",
    )  # fmt: skip

    def __init__(
        self,
        packed_prompt: bytes | bytearray,
        sampling: Sampling,
        tokenizer: SimTokenizer,
        *,
        answer_tokens: int,
        default_seed: int,
        revision: str = "",
        adapter: str = "",
    ) -> None:
        """`answer_tokens` is the mean length of answers that only an end-of-sequence token ends.

        Another `revision` gives other tokens, as other weights would.
        """
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        seed = 0
        if sampling.temperature > 0:
            drawn = sampling.seed if sampling.seed is not None else default_seed
            seed = xxhash.xxh3_64_intdigest(b"seed:%d" % drawn)
        if revision:
            seed ^= xxhash.xxh3_64_intdigest(b"revision:" + revision.encode("utf-8", "surrogatepass"))
        if adapter:
            seed ^= xxhash.xxh3_64_intdigest(adapter.encode())
        self._chain = xxhash.xxh3_64(packed_prompt, seed)
        self._sampling = sampling
        self._texts = tokenizer.texts
        self._eos_below = 0 if sampling.ignore_eos else (1 << 32) // answer_tokens
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._lowest_visible = NUM_SPECIAL if sampling.skip_special_tokens else 0
        self._num_tokens = 0
        self._held = ""
        self._late = ""
        self._num_ahead = 0
        self._bad_words = [tuple(tokenizer.encode(words)) for words in sampling.bad_words]
        self._recent: list[int] = []
        self._constrained = bool(
            sampling.logit_bias
            or sampling.allowed_token_ids
            or self._bad_words
            or (self._stop_ids and sampling.min_tokens)
        )

    def next_token(self) -> int:
        """Sets `text` (sent now), `finish_reason` and `stop_reason`."""
        sampling = self._sampling
        digest = self._chain.intdigest()
        may_stop = self._num_tokens >= sampling.min_tokens
        if self._constrained:
            token_id = self._choose(digest, may_stop=may_stop)
        elif may_stop and digest & 0xFFFFFFFF < self._eos_below:
            token_id = EOS
        else:
            token_id = NUM_SPECIAL + (digest >> 20) % NUM_WORDS
        self._append(token_id, may_stop=may_stop)
        return token_id

    def resume(self, token_ids: Sequence[int], num_chars: int) -> list[str]:
        """Append another engine's tokens and return their texts; `num_chars` characters were delivered."""
        texts = []
        for token_id in token_ids:
            self._append(token_id, may_stop=self._num_tokens >= self._sampling.min_tokens)
            if self._bad_words:
                self._recent.append(token_id)
            texts.append(self.text)
            # An ended answer is never continued.
            self.finish_reason = self.stop_reason = None
        text = "".join(texts)
        self._late = text[num_chars:]
        self._num_ahead = max(0, num_chars - len(text))
        return texts

    def _append(self, token_id: int, *, may_stop: bool) -> None:
        sampling = self._sampling
        self._chain.update(token_id.to_bytes(4, "little"))
        self._num_tokens += 1
        self.text = self._texts[token_id] if token_id >= self._lowest_visible else ""
        if token_id == EOS and not sampling.ignore_eos and may_stop:
            self.finish_reason = FinishReason.STOP
        elif token_id in self._stop_ids and may_stop:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = token_id
        if self.finish_reason is not None and not sampling.include_stop_str_in_output:
            self.text = ""
        if sampling.stop:
            self._match_stop_strings(sampling.stop)
        if self.finish_reason is None and self._num_tokens >= sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None and self._held:
            self.text += self.flush()
        if self._late:
            self.text, self._late = self._late + self.text, ""
        if self._num_ahead:
            self.text, self._num_ahead = self.text[self._num_ahead :], max(0, self._num_ahead - len(self.text))

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def logprobs(self, before: int, token_id: int) -> Sequence[TokenLogprob]:
        num_alternatives = self._sampling.logprobs or 0
        likely = 0.5 + (before >> 40) / (1 << 24) * 0.45
        position = [TokenLogprob(token_id, self._texts[token_id], math.log(likely))]
        left = 1.0 - likely
        i = 1
        seen = {token_id}
        while len(position) <= num_alternatives:
            other = _candidate(before, i)
            i += 1
            if other not in seen:
                seen.add(other)
                left /= 2
                position.append(TokenLogprob(other, self._texts[other], math.log(left)))
        return position

    def digest(self) -> int:
        return self._chain.intdigest()

    def _match_stop_strings(self, stop: tuple[str, ...]) -> None:
        if self._num_tokens <= self._sampling.min_tokens:
            return
        pending = self._held + self.text
        self._held = ""
        found = [(at, text) for text in stop if (at := pending.find(text)) >= 0]
        if found:
            at, text = min(found, key=lambda hit: hit[0])
            end = at + len(text) if self._sampling.include_stop_str_in_output else at
            self.text = pending[:end]
            self.finish_reason = FinishReason.STOP
            self.stop_reason = text
            return
        length = max(_overlap(pending, text) for text in stop)
        shown = len(pending) - length
        self.text, self._held = pending[:shown], pending[shown:]

    def _choose(self, digest: int, *, may_stop: bool) -> int:
        sampling = self._sampling
        banned: frozenset[int] = frozenset() if may_stop else self._stop_ids | {EOS}
        if sampling.ignore_eos:
            banned = banned | {EOS}
        for words in self._bad_words:
            head = words[:-1]
            if words and tuple(self._recent[len(self._recent) - len(head) :]) == head:
                banned = banned | {words[-1]}
        scores: dict[int, float] = {}
        if sampling.allowed_token_ids:
            for token_id in sampling.allowed_token_ids:
                scores[token_id] = _mix(digest + token_id * _GOLDEN) / (1 << 64)
        else:
            for i in range(_NUM_CANDIDATES + len(banned)):
                scores.setdefault(_candidate(digest, i), -float(i))
            scores.update({token_id: -30.0 for token_id in sampling.logit_bias if token_id not in scores})
            if digest & 0xFFFFFFFF < self._eos_below:
                scores[EOS] = 1.0
        for token_id, bias in sampling.logit_bias.items():
            if token_id in scores:
                scores[token_id] += bias
        allowed = [token_id for token_id in scores if token_id not in banned] or list(scores)
        chosen = max(allowed, key=lambda token_id: (scores[token_id], -token_id))
        if self._bad_words:
            self._recent.append(chosen)
        return chosen


def _candidate(digest: int, i: int) -> int:
    if i == 0:
        return NUM_SPECIAL + (digest >> 20) % NUM_WORDS
    return NUM_SPECIAL + _mix(digest + i * _GOLDEN) % NUM_WORDS


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele et al. 2014)."""
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


NAME = "sim"
NUM_REASONING_WORDS = 3
NUM_CONTENT_WORDS = 2

_WORDS = re.compile(r" [^ ]*|[^ ]+")  # whole words, or the rest of one that began earlier


def check_name(key: str, name: str) -> None:
    if name not in ("", NAME):
        raise ConfigError(f"{key}: the sim engine has no parser {name!r}; it has {NAME!r}")


def parse_of(body: Mapping[str, Any], tool_parser: str, reasoning_parser: str) -> Parse | None:
    """Return None for plain text."""
    choice = body.get("tool_choice") or "auto"
    tools = body.get("tools") if tool_parser else None
    if not tools and not reasoning_parser:
        return None
    function = ""
    if tools and choice != "none":
        function = choice["function"]["name"] if isinstance(choice, Mapping) else tools[0]["function"]["name"]
    values = {
        "function": function,
        "num_reasoning": NUM_REASONING_WORDS if reasoning_parser else 0,
        "num_content": NUM_CONTENT_WORDS if choice == "auto" else 0,
        "tell_reasoning": body.get("include_reasoning") is not False,
    }
    return Parse(json.dumps(values).encode())


class SimParser:
    """A word's place in the answer decides its kind.

    First come `NUM_REASONING_WORDS`, if the model reasons; with tools, then `NUM_CONTENT_WORDS` (none when a call is
    required) and one call with the rest.
    """

    def __init__(self, parse: Parse) -> None:
        values = json.loads(parse.request)
        self._function: str = values["function"]
        self._num_reasoning: int = values["num_reasoning"]
        self._num_before_call: int = values["num_reasoning"] + values["num_content"]
        self._tell_reasoning: bool = values["tell_reasoning"]
        self._num_words = 0
        self._calls = False

    def feed(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        content = reasoning = arguments = ""
        began = False
        for word in _WORDS.findall(text):
            self._num_words += word[0] == " "
            if self._num_words <= self._num_reasoning:
                reasoning += word
            elif self._function and self._num_words > self._num_before_call:
                if not self._calls:
                    self._calls = began = True
                    arguments = '{"words": "'
                arguments += json.dumps(word)[1:-1]
            else:
                content += word
        if finished and self._calls:
            arguments += '"}'
        if not self._tell_reasoning:
            reasoning = ""
        if not (content or reasoning or arguments):
            return None
        calls: tuple[ToolCallDelta, ...] = ()
        if began:
            calls = (ToolCallDelta(0, f"call-{self._function}", self._function, arguments),)
        elif arguments:
            calls = (ToolCallDelta(0, arguments=arguments),)
        return AnswerDelta(content, reasoning, calls)
