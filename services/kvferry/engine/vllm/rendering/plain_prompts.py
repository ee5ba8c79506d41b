"""Renders plain chats and prompts in a fifth of the time of vLLM's renderer.

It runs vLLM's parts without thread hops. Use it only if `verify` finds no difference. vLLM's renderer gets the rest,
failures too, so that errors are vLLM's.
"""

from __future__ import annotations

import functools
import json
import logging
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from kvferry.engine.base import ANYBODY, CacheSalt, Parse, PromptImage, Sampling
from kvferry.engine.vllm.rendering.template_tokens import TemplateTokens
from kvferry.engine.vllm.rendering.tokenizer_words import keep_no_words_of_clients
from kvferry.errors import ContextLengthExceeded

log = logging.getLogger(__name__)

# Fields that affect only sampling parameters. Not `min_tokens`: its bounds depend on the prompt's length.
SAMPLING_FIELDS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop",
        "ignore_eos", "logprobs", "top_logprobs", "include_stop_str_in_output", "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)  # fmt: skip
CHAT_FIELDS = SAMPLING_FIELDS | {"messages", "max_tokens", "max_completion_tokens", "seed"}
COMPLETION_FIELDS = SAMPLING_FIELDS | {"prompt", "max_tokens", "seed", "add_special_tokens"}

ROLES = frozenset({"system", "user", "assistant"})

_NUM_KEPT_SAMPLINGS = 4096
CHARS_PER_PART = 50  # that a message, or a part of one, takes as long as, besides its own


class Rendered(msgspec.Struct, frozen=True):
    """`sampling.max_tokens` is vLLM's default, or 0 for a prompt that does not fit the context."""

    token_ids: Sequence[int]
    sampling: Sampling
    parse: Parse | None = None
    images: tuple[PromptImage, ...] = ()


class PlainPrompts:
    """Thread-safe. Raises TypeError for unknown kinds of tokenizers."""

    def __init__(self, serving: Any) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
        from vllm.renderers.chat_utils import parse_chat_messages
        from vllm.renderers.hf import HfRenderer, resolve_chat_template, resolve_chat_template_content_format

        online = serving.online_renderer
        # Most parsers change nothing about a body without tools; `verify` finds those that do.
        always_adjusts = online.parser is not None and online.parser.always_adjust_request
        if not isinstance(online.renderer, HfRenderer) or online.use_harmony or always_adjusts:
            raise TypeError("this model's prompts are not rendered by a Hugging Face tokenizer alone")
        tokenizer = online.renderer.get_tokenizer()
        if not tokenizer.is_fast:
            raise TypeError("this model's tokenizer is not a fast one")
        self._serving = serving
        self._model_config = online.model_config
        self._max_model_len = int(self._model_config.max_model_len)
        self._max_chars = self._max_model_len * int(tokenizer.max_chars_per_token)
        self._tokenizer = copy_of(tokenizer)
        template = resolve_chat_template(
            tokenizer, chat_template=online.chat_template, tools=None, model_config=self._model_config
        )
        self._template = _compile_jinja_template(template) if template is not None else None
        self._template_values = {
            **(self._template.globals if self._template is not None else {}),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **tokenizer.special_tokens_map,
        }
        self._content_format = (
            resolve_chat_template_content_format(
                chat_template=online.chat_template,
                tools=None,
                given_format=online.chat_template_content_format,
                tokenizer=tokenizer,
                model_config=self._model_config,
            )
            if template is not None
            else "string"
        )
        # vLLM gives such a model's template the text of a user or an assistant as it is.
        self._keeps_texts = self._content_format == "string" and not (
            self._model_config.enable_prompt_embeds or self._model_config.multimodal_config
        )
        # Names of vLLM's that each request needs: an import statement takes longer than an attribute.
        self._parse_chat_messages, self._get_max_tokens = parse_chat_messages, get_max_tokens
        self._default_max_tokens = CompletionRequest.model_fields["max_tokens"].default
        # By salt too: stop strings are texts, and a tenant's requests must not tell by their time what others sent.
        self._sampling_of = functools.lru_cache(_NUM_KEPT_SAMPLINGS)(self._resolve)
        self._template_tokens = self._tokens_of_template()

    def num_tokens(self, text: str) -> int:
        return len(self._encode(text))

    def takes_chat(self, body: Mapping[str, Any]) -> bool:
        return (
            self._template is not None
            and CHAT_FIELDS.issuperset(body)
            and body.get("seed") != -1  # means none in vLLM
            and all(
                len(message) == 2 and message.get("role") in ROLES and _is_text(message.get("content"))
                for message in body["messages"]
            )
        )

    def takes_completion(self, body: Mapping[str, Any]) -> bool:
        return (
            COMPLETION_FIELDS.issuperset(body) and body.get("seed") != -1 and set(map(type, prompts_of(body))) == {str}
        )

    def chat(self, body: Mapping[str, Any], *, salt: CacheSalt = ANYBODY.salt) -> Rendered | None:
        """Render a body that `takes_chat`. None: use vLLM's renderer. Raises ContextLengthExceeded."""
        try:
            text = self._render(self._conversation(body["messages"]))
            return self._rendered("chat", text, body, self._template_tokens.encode, salt)
        except ContextLengthExceeded:
            raise
        except Exception:  # vLLM's renderer reports it
            return None

    def _tokens_of_template(self) -> TemplateTokens:
        if self._template is not None:
            try:
                return TemplateTokens.of(json.loads(self._tokenizer.to_str()), self._encode, self._render_message)
            except Exception:  # the template takes no single message of a user
                log.info("no tokens of the chat template are kept", exc_info=True)
        return TemplateTokens(self._encode)

    def _render(self, conversation: Sequence[Any]) -> str:
        assert self._template is not None
        # Like `render`, but without merging the same globals each time.
        context = self._template.new_context({**self._template_values, "messages": conversation}, shared=True)
        return "".join(self._template.root_render_func(context))

    def _render_message(self, text: str) -> str:
        return self._render(self._conversation([{"role": "user", "content": text}]))

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        conversation: list[Any] = []
        for message in messages:
            if self._keeps_texts and type(message["content"]) is str and message["role"] != "system":
                conversation.append(message)
            else:
                parsed, _, _ = self._parse_chat_messages(
                    [message], self._model_config, content_format=self._content_format
                )
                conversation.extend(parsed)
        return conversation

    def completions(
        self, body: Mapping[str, Any], prompts: Sequence[str], *, salt: CacheSalt = ANYBODY.salt
    ) -> list[Rendered] | None:
        """Render some prompts of a body that `takes_completion`. None: use vLLM's renderer.

        Raises ContextLengthExceeded.
        """
        encode = functools.partial(self._encode, add_special_tokens=body.get("add_special_tokens", True))
        all_rendered = []
        try:
            for prompt in prompts:
                rendered = self._rendered("completion", prompt, body, encode, salt)
                if rendered is None:
                    return None
                all_rendered.append(rendered)
        except ContextLengthExceeded:
            raise
        except Exception:  # as above
            return None
        return all_rendered

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> array[int]:
        # The tokenizer's `encode` would hold the GIL.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)

    def _rendered(
        self, kind: str, text: str, body: Mapping[str, Any], encode: Callable[[str], array[int]], salt: CacheSalt
    ) -> Rendered | None:
        if len(text) > self._max_chars:
            raise too_many_chars(
                self._max_model_len, self._max_chars, len(text), "messages" if kind == "chat" else "prompt"
            )
        token_ids = encode(text)
        if not token_ids:
            return None
        asked = {name: value for name, value in body.items() if name in SAMPLING_FIELDS}
        max_tokens = 0  # the prompt is too long: vLLM's renderer would only find the same, in more time
        if len(token_ids) < self._max_model_len:
            max_tokens = self._get_max_tokens(
                self._max_model_len,
                None if kind == "chat" else self._default_max_tokens,
                len(token_ids),
                self._serving.default_sampling_params,
                self._serving.override_max_tokens,
            )
        sampling = self._sampling_of(kind, msgspec.json.encode(asked), salt)
        return Rendered(token_ids, structs.replace(sampling, max_tokens=max_tokens, seed=body.get("seed")))

    def _resolve(self, kind: str, asked: bytes, _: CacheSalt) -> Sampling:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        from kvferry.engine.vllm.sampling import from_vllm

        fields = msgspec.json.decode(asked)
        if kind == "chat":
            request = ChatCompletionRequest.model_validate(
                {"messages": [{"role": "user", "content": ""}], "model": "", **fields}
            )
        else:
            request = CompletionRequest.model_validate({"prompt": "x", "model": "", **fields})
        return from_vllm(request.to_sampling_params(1, self._serving.default_sampling_params))


def copy_of(tokenizer: Any) -> Any:
    """Return a fast tokenizer without truncation, which other users of the original set, and without clients' words."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    keep_no_words_of_clients(copy)
    return copy


def too_many_chars(max_model_len: int, max_chars: int, num_chars: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"this model's context is {max_model_len} tokens, which have {max_chars} characters at most, but {param} has "
        f"{num_chars}",
        param=param,
    )


def too_many_tokens(max_model_len: int, num_chars: int, num_tokens: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"this model's context is {max_model_len} tokens, but the first {num_chars} characters of {param} alone have "
        f"{num_tokens}",
        param=param,
    )


def prompts_of(body: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a completion: texts, or lists of token ids."""
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) else [prompt]


def _is_text(content: Any) -> bool:
    return type(content) is str or (
        type(content) is list
        and all(len(part) == 2 and part.get("type") == "text" and type(part.get("text")) is str for part in content)
    )


def cost_in_chars(message: Mapping[str, Any]) -> int:
    """Return the time to render a message, in characters."""
    content = message["content"]
    if isinstance(content, str):
        return CHARS_PER_PART + len(content)
    return CHARS_PER_PART + sum(CHARS_PER_PART + len(part["text"]) for part in content)


def _chat(*turns: tuple[str, str | list[dict[str, str]]], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# Inputs that templates and tokenizers may treat in special ways.
CHAT_PROBES: Sequence[Mapping[str, Any]] = (
    _chat(("user", "hi")),
    _chat(("user", "")),
    _chat(("user", "  leading and trailing spaces \n\n")),
    _chat(("system", "You are terse."), ("user", "one"), ("assistant", "two"), ("user", "three")),
    _chat(("system", ""), ("user", "no system text")),
    _chat(("system", "a"), ("system", "b"), ("user", "c")),
    _chat(("user", "a"), ("user", "b")),
    _chat(("assistant", "I begin"), ("user", "b")),
    _chat(("user", "the last turn is the assistant's"), ("assistant", "So")),
    _chat(("user", "ünïcödé 漢字 😀 \u200d \u0301 \ufeff עברית")),
    _chat(("user", "<|im_start|>system\nspecial<|im_end|> </s> <s> [INST] <|endoftext|> <|eot_id|>")),
    _chat(("user", "{{ messages }} {% raw %} \\n \t\r\n \x00")),
    _chat(("user", "word " * 700)),
    _chat(
        ("user", "hi"),
        temperature=0.0, top_p=0.5, top_k=7, min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.1, stop=["x", "y"], seed=7, logprobs=True, top_logprobs=3, ignore_eos=True,
        include_stop_str_in_output=True, skip_special_tokens=False, spaces_between_special_tokens=False,
    ),
    _chat(("user", "hi"), stop="x", logprobs=True, temperature=0.02),
    _chat(("system", _parts("a", "b")), ("user", _parts("one part")), ("assistant", _parts("c", "d")), ("user", "e")),
    _chat(("user", _parts("", "  two \n", "\n\nthree <|im_end|>", ""))),
    _chat(("user", [])),
)  # fmt: skip
COMPLETION_PROBES: Sequence[Mapping[str, Any]] = (
    {"prompt": "Once upon a time"},
    {"prompt": " "},
    {"prompt": "ünïcödé 漢字 😀 <|im_start|> </s> <s>", "add_special_tokens": False},
    {"prompt": "<s>\n\nword " * 100, "temperature": 0.7, "stop": "x", "logprobs": 2, "seed": 3},
    {"prompt": ["one", " two\n", "one"], "temperature": 0.5, "seed": 7},
)

Ask = Callable[[Mapping[str, Any]], Awaitable[Sequence[Rendered]]]


async def verify(plain: PlainPrompts, ask_chat: Ask, ask_completions: Ask) -> str:
    """Return the first difference from vLLM's renderer, or an empty string."""
    for probe in CHAT_PROBES:
        if plain.takes_chat(probe):
            chat = plain.chat(probe)
            if difference := await _difference(probe, None if chat is None else [chat], ask_chat):
                return difference
    for probe in COMPLETION_PROBES:
        if difference := await _difference(probe, plain.completions(probe, prompts_of(probe)), ask_completions):
            return difference
    return ""


async def _difference(probe: Mapping[str, Any], got: list[Rendered] | None, ask: Ask) -> str:
    try:
        all_wanted = await ask(probe)
    except Exception as error:
        return "" if got is None else f"vLLM refuses {probe}: {error}"
    if got is None:
        return f"vLLM alone renders {probe}"
    if [list(one.token_ids) for one in got] != [list(one.token_ids) for one in all_wanted]:
        return f"other tokens for {probe}"
    for one, wanted in zip(got, all_wanted, strict=True):
        if one.sampling != wanted.sampling:
            return f"other parameters for {probe}: {one.sampling}, not {wanted.sampling}"
    return ""
