"""vLLM's renderer without an engine.

Importing takes about 8 s of CPU: do it once, at start-up.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from msgspec import structs

from kvferry.config import ModelConfig
from kvferry.engine.base import ANYBODY, Asker, ChatImage, Parse, RenderedPrompt, RenderOutcomes
from kvferry.engine.fair_turns import FairTurns
from kvferry.engine.fork_process import ForkProcess, InheritedFile
from kvferry.engine.grammar_checks import LIMITS, GrammarChecks
from kvferry.engine.image_chats import ImageChats
from kvferry.engine.vllm.model_kinds import IMAGE_ARCHITECTURES
from kvferry.engine.vllm.rendering.grammars import grammar_of, prepared_spec, special_tokens_of, with_place
from kvferry.engine.vllm.rendering.plain_prompts import (
    CHARS_PER_PART,
    PlainPrompts,
    Rendered,
    copy_of,
    cost_in_chars,
    prompts_of,
    too_many_chars,
    too_many_tokens,
    verify,
)
from kvferry.engine.vllm.rendering.render_loop import RenderLoop
from kvferry.engine.vllm.rendering.vllm_prompts import VllmPrompts
from kvferry.engine.vllm.rendering.vocabulary import Vocabulary
from kvferry.errors import ContextLengthExceeded, InvalidRequest
from kvferry.util import collector

log = logging.getLogger(__name__)

R = TypeVar("R")

# Longer prompts are rendered in a thread (0.1 ms there and back). This many characters take about 0.6 ms on the event
# loop, which delays the tokens of all streams.
MOST_CHARS_AT_ONCE = 2_000

_PART_CHARS = 10_000  # of a list's prompts, or of a long text's beginning, that have one turn: about 3 ms
MAX_WAITING = 256  # texts that wait to be rendered
# A text of more characters than this for each token of the context rarely fits: only its beginning is tokenized
# first, which is enough to refuse it. Tokens at the ends of a part may differ from those of the whole.
_CHARS_PER_TOKEN = 16
_DIFFERENT_TOKENS = 64


class VllmRenderer:
    """Needs the model's folder, never its weights.

    Plain prompts take a short way if `verify` found no difference.
    """

    def __init__(
        self,
        model_folder: str,
        served_name: str,
        model: ModelConfig,
        images: ImageChats | None = None,
    ) -> None:
        """Without `images`, or where the model takes none, chats with images are refused."""
        self._vllm = VllmPrompts(model_folder, served_name, model)
        tokenizer = self._vllm.online.renderer.get_tokenizer()
        self._grammars = _grammar_checks(tokenizer, int(self._vllm.model_config.get_vocab_size()))
        self._special_tokens = special_tokens_of(tokenizer)
        self._images = images if self._vllm.model_config.architecture in IMAGE_ARCHITECTURES else None
        if self._images is not None:
            self._vllm.require_image_processor()
        self._model = model
        config = self._vllm.model_config
        self._max_model_len = int(config.max_model_len)
        # No text of more characters fits the context. Not every tokenizer knows it.
        chars_per_token = getattr(self._vllm.online.renderer.get_tokenizer(), "max_chars_per_token", None)
        self._max_chars = self._max_model_len * int(chars_per_token) if chars_per_token else None
        self._vocabulary = Vocabulary(config, self._vllm.online.renderer.get_tokenizer())
        if mismatch := self._vocabulary.mismatch:
            log.warning("%s", mismatch)
        self._plain_parse = self._parse_of_plain()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="render")
        self._turns = FairTurns(1, MAX_WAITING, f"{MAX_WAITING} texts wait to be rendered, the limit of this gateway")
        # vLLM's renderer keeps the loop that first ran it.
        self._loop = RenderLoop()
        self._plain = self._verified_plain_prompts()
        collector.freeze_loaded()

    @property
    def renders_plain_prompts_itself(self) -> bool:
        return self._plain is not None

    def _verified_plain_prompts(self) -> PlainPrompts | None:
        try:
            plain = PlainPrompts(self._vllm.serving)
            difference = self._loop.run_and_wait(verify(plain, self._ask_chats, self._vllm.completions))
        except Exception as error:
            # vLLM's own renderer works without PlainPrompts.
            difference = f"{type(error).__name__}: {error}"
        if not difference:
            return plain
        log.warning("plain prompts are left to vLLM's renderer, which takes longer: %s", difference)
        return None

    def _parse_of_plain(self) -> Parse | None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        from kvferry.engine.vllm.parsing import parse_of

        body: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}
        request = ChatCompletionRequest.model_validate({**body, "model": ""})
        return parse_of(
            body, self._model, self._vllm.online.effective_chat_template_kwargs(request), reasoning_ended=None
        )

    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def outcomes(self) -> RenderOutcomes:
        grammars, images = self._grammars, self._images
        return RenderOutcomes(
            grammars=grammars.outcomes if grammars is not None else {},
            image_chats=images.outcomes if images is not None else {},
            images=images.image_outcomes if images is not None else {},
        )

    @property
    def takes_images(self) -> bool:
        return self._images is not None

    def start(self) -> None:
        if self._grammars is not None:
            self._grammars.start()
        if self._images is not None:
            self._loop.call_soon(self._images.start)

    async def close(self) -> None:
        if self._grammars is not None:
            await self._grammars.close()
        if self._images is not None and self._loop.is_running:
            await self._loop.run(self._images.close())
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    async def render_chat(
        self, body: Mapping[str, Any], images: Sequence[ChatImage] = (), *, asker: Asker = ANYBODY
    ) -> RenderedPrompt:
        if body.get("tools") and body.get("tool_choice") != "none" and not self._model.tool_parser:
            raise InvalidRequest(
                "tools need model.tool_parser in this cluster's configuration, which is not set; "
                'with tool_choice "none" the model is only told of them',
                param="tools",
            )
        await self._check_texts(body["messages"], asker)
        requested = body.get("max_completion_tokens")
        if requested is None:
            requested = body.get("max_tokens")
        rendered: Rendered | None = None
        if images:
            rendered = await self._chat_with_images(body, images, asker)
        elif self._plain is not None and self._plain.takes_chat(body):
            cost = sum(map(cost_in_chars, body["messages"]))
            render = functools.partial(self._plain.chat, salt=asker.salt)
            rendered = await self._at_once_if_short(render, body, cost, asker)
            if rendered is not None and self._plain_parse is not None:
                rendered = structs.replace(rendered, parse=self._plain_parse)
        if rendered is None:
            rendered = await self._turns.run(asker.tenant, lambda: self._loop.run(self._vllm.chat(body)))
        (rendered,) = await self._with_grammars(body, [rendered], asker)
        return self._within_context(rendered, requested, "messages")

    async def _chat_with_images(self, body: Mapping[str, Any], images: Sequence[ChatImage], asker: Asker) -> Rendered:
        if self._images is None:
            raise InvalidRequest(f"{images[0].where}: this model takes no images", param=images[0].where)
        chat = await self._loop.run(self._images.render(body, images, asker))
        return Rendered(chat.token_ids, chat.sampling, chat.parse, chat.images)

    async def render_completion(self, body: Mapping[str, Any], *, asker: Asker = ANYBODY) -> Sequence[RenderedPrompt]:
        texts = [prompt for prompt in prompts_of(body) if isinstance(prompt, str)]
        for text in texts:
            self._check_num_chars(len(text), "prompt")
        for text in texts:
            await self._check_beginning([text], "prompt", asker)
        requested = body.get("max_tokens", 16)
        if self._plain is not None and self._plain.takes_completion(body):
            rendered = await self._plain_completions(self._plain, body, texts, requested, asker)
            if rendered is not None:
                return rendered
        asked = await self._turns.run(asker.tenant, lambda: self._loop.run(self._vllm.completions(body)))
        asked = await self._with_grammars(body, asked, asker)
        return [self._within_context(one, requested, "prompt") for one in asked]

    async def _plain_completions(
        self, plain: PlainPrompts, body: Mapping[str, Any], prompts: Sequence[str], requested: int | None, asker: Asker
    ) -> list[RenderedPrompt] | None:
        """Render a few prompts at a time, so that others' prompts need not wait for the whole list."""
        rendered: list[RenderedPrompt] = []
        for part, cost in _in_parts(prompts):
            render = functools.partial(plain.completions, prompts=part, salt=asker.salt)
            some = await self._at_once_if_short(render, body, cost, asker)
            if some is None:
                return None
            rendered += [self._within_context(one, requested, "prompt") for one in some]
        return rendered

    async def _with_grammars(
        self, body: Mapping[str, Any], rendered: Sequence[Rendered], asker: Asker
    ) -> Sequence[Rendered]:
        """Return the prompts with the grammars that engines get, after a try of each."""
        specs = {one.sampling.structured_outputs for one in rendered} - {""}
        if not specs:
            return rendered
        made = {"": "", **{spec: await self._tried(spec, _grammar_field(body), asker) for spec in specs}}
        return [
            structs.replace(
                one, sampling=structs.replace(one.sampling, structured_outputs=made[one.sampling.structured_outputs])
            )
            for one in rendered
        ]

    async def _tried(self, spec: str, param: str | None, asker: Asker) -> str:
        if self._grammars is None:
            raise InvalidRequest("structured outputs need a fast tokenizer, which this model has not", param=param)
        made = ""
        try:
            # A long one takes its tenant's turn, as a long text does: 128 tools take tens of milliseconds.
            if len(spec) <= MOST_CHARS_AT_ONCE:
                made, grammar = self._made(spec)
            else:
                made, grammar = await self._turns.run(asker.tenant, lambda: self._in_thread(lambda: self._made(spec)))
            await self._grammars.check(grammar, asker)
        except InvalidRequest as error:
            reason = with_place(error.message, made) if made else error.message
            raise InvalidRequest(f"{param}: {reason}" if param else reason, param=param) from None
        return made

    def _made(self, spec: str) -> tuple[str, str]:
        made = prepared_spec(spec, self._special_tokens)
        return made, grammar_of(made)

    async def _at_once_if_short(
        self, render: Callable[[Mapping[str, Any]], R], body: Mapping[str, Any], num_chars: int, asker: Asker
    ) -> R:
        if num_chars <= MOST_CHARS_AT_ONCE:
            return render(body)
        return await self._turns.run(asker.tenant, lambda: self._in_thread(functools.partial(render, body)))

    async def _in_thread(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _check_num_chars(self, num_chars: int, param: str) -> None:
        """Refuse, before templates and tokenizers copy it, a text that cannot fit."""
        if self._max_chars is not None and num_chars > self._max_chars:
            raise too_many_chars(self._max_model_len, self._max_chars, num_chars, param)

    async def _check_beginning(self, texts: Iterable[str], param: str, asker: Asker) -> None:
        # Refuses a text of which a part has more tokens than the context, before all of it is tokenized. Each part has
        # a turn of its own, so that others' texts wait for one part.
        plain, most = self._plain, _CHARS_PER_TOKEN * self._max_model_len
        if plain is None:
            return
        parts, num_chars = [], 0
        for text in texts:
            parts.append(text[: most - num_chars])
            num_chars += len(parts[-1])
            if num_chars == most:
                break
        else:
            return
        beginning = "".join(parts)
        num_tokens, limit = 0, self._max_model_len
        for first in range(0, most, _PART_CHARS):
            part = beginning[first : first + _PART_CHARS]
            count = functools.partial(plain.num_tokens, part)
            num_tokens += await self._turns.run(asker.tenant, functools.partial(self._in_thread, count))
            limit += _DIFFERENT_TOKENS
            if num_tokens > limit:
                raise too_many_tokens(self._max_model_len, first + len(part), num_tokens, param)

    async def _check_texts(self, messages: Sequence[Mapping[str, Any]], asker: Asker) -> None:
        # Every chat template repeats what users said. Some leave out what others said, but no message of theirs is
        # longer than a context.
        num_of_users = 0
        of_users: list[str] = []
        for message in messages:
            content = message.get("content")
            if content is None:
                continue
            texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            num_chars = sum(map(len, texts))
            self._check_num_chars(num_chars, "messages")
            if message.get("role") == "user":
                num_of_users += num_chars
                of_users += texts
        self._check_num_chars(num_of_users, "messages")
        await self._check_beginning(of_users, "messages", asker)

    async def _ask_chats(self, body: Mapping[str, Any]) -> Sequence[Rendered]:
        return [await self._vllm.chat(body)]

    def _within_context(self, rendered: Rendered, requested: int | None, field: str) -> RenderedPrompt:
        sampling = rendered.sampling
        self._vocabulary.check_prompt(field, rendered.token_ids)
        self._vocabulary.check_sampling(sampling)
        num_prompt_tokens = len(rendered.token_ids)
        if num_prompt_tokens > self._max_model_len:
            raise ContextLengthExceeded(
                f"this model's context is {self._max_model_len} tokens, but {field} has {num_prompt_tokens}",
                param=field,
            )
        if requested is not None:
            if num_prompt_tokens + requested > self._max_model_len:
                raise context_exceeded(self._max_model_len, num_prompt_tokens, requested)
            sampling = structs.replace(sampling, max_tokens=requested)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({sampling.min_tokens}) is over max_tokens ({sampling.max_tokens})", param="min_tokens"
            )
        if sampling.max_tokens < 1:
            raise context_exceeded(self._max_model_len, num_prompt_tokens, 1)
        return RenderedPrompt(rendered.token_ids, sampling, parse=rendered.parse, images=rendered.images)


def _grammar_checks(tokenizer: Any, vocabulary_size: int) -> GrammarChecks | None:
    """Return None for a tokenizer that is not a fast one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    file = InheritedFile(copy_of(tokenizer).to_str().encode())
    command = [
        *(sys.executable, "-m", "kvferry.engine.grammar_process", "--tokenizer", str(file.path)),
        *("--vocabulary-size", str(max(vocabulary_size, len(tokenizer))), "--eos-token", str(tokenizer.eos_token_id)),
    ]
    return GrammarChecks(ForkProcess(command, LIMITS, "grammars cannot be tried now", [file]))


def _in_parts(prompts: Sequence[str]) -> Iterator[tuple[Sequence[str], int]]:
    """Yield a list's prompts in parts that cost at most _PART_CHARS, or are one prompt; and what they cost."""
    first, cost = 0, 0
    for number, prompt in enumerate(prompts):
        cost_of_one = CHARS_PER_PART + len(prompt)
        if number > first and cost + cost_of_one > _PART_CHARS:
            yield prompts[first:number], cost
            first, cost = number, 0
        cost += cost_of_one
    yield prompts[first:], cost


def _grammar_field(body: Mapping[str, Any]) -> str | None:
    return next((name for name in ("structured_outputs", "response_format", "tools") if body.get(name)), None)


def context_exceeded(max_model_len: int, num_prompt_tokens: int, max_tokens: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"this model's context is {max_model_len} tokens, but the request asks for {num_prompt_tokens + max_tokens}: "
        f"{num_prompt_tokens} in the prompt and {max_tokens} to generate",
        param="max_tokens",
    )
