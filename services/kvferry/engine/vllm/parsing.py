"""vLLM's parsers. The gateway's renderer describes one (`parse_of`); the worker makes one per answer
(`Parsers.begin`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvferry.config import ModelConfig
from kvferry.engine.base import AnswerDelta, EngineRequest, Parse, ToolCallDelta
from kvferry.engine.parsing import ParsedAnswer
from kvferry.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

# Fields of a chat body that parsers read.
FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort")


def check_names(model: ModelConfig) -> None:
    """Raises ConfigError for an unknown parser."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for key, name, manager in (
        ("model.tool_parser", model.tool_parser, ToolParserManager),
        ("model.reasoning_parser", model.reasoning_parser, ReasoningParserManager),
    ):
        known = manager.list_registered()
        if name and name not in known:
            raise ConfigError(f"{key}: vLLM has no parser {name!r}; it has {', '.join(known)}")


def parse_of(
    body: Mapping[str, Any],
    model: ModelConfig,
    chat_template_kwargs: Mapping[str, Any],
    *,
    reasoning_ended: bool | None,
) -> Parse | None:
    """Return None for plain text. `reasoning_ended` tells whether a grammar applies from the first token on."""
    if not model.reasoning_parser and not (model.tool_parser and body.get("tools")):
        return None
    values = {
        "request": {name: body[name] for name in FIELDS if name in body},
        "chat_template_kwargs": dict(chat_template_kwargs),
        "reasoning_ended": reasoning_ended,
        "num_earlier_calls": sum(len(message.get("tool_calls") or ()) for message in body["messages"]),
    }
    return Parse(json.dumps(values).encode())


@dataclass(frozen=True, slots=True)
class Begun:
    answer: ParsedAnswer
    engine_arguments: Mapping[str, Any]


class Parsers:
    """Raises ConfigError for an unknown parser, or one whose tokens the tokenizer lacks."""

    def __init__(self, model: ModelConfig, tokenizer: Any, vllm_model_config: Any) -> None:
        from vllm.parser import ParserManager

        check_names(model)
        self._tokenizer = tokenizer
        self._model_config = vllm_model_config
        self._reasoning = bool(model.reasoning_parser)
        try:
            self._parser_class = ParserManager.get_parser(
                tool_parser_name=model.tool_parser or None,
                reasoning_parser_name=model.reasoning_parser or None,
                enable_auto_tools=bool(model.tool_parser),
                model_name=vllm_model_config.model,
                is_harmony=vllm_model_config.hf_config.model_type == "gpt_oss",
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ConfigError(f"model.tool_parser, model.reasoning_parser: {error}") from None

    def begin(self, request: EngineRequest, params: Any) -> Begun:
        """`params` are vLLM's, of the whole answer. Raises EngineError if gateway and worker configurations differ."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        parse, continued = request.parse, request.continued
        assert parse is not None
        if self._parser_class is None:
            raise EngineError("the gateway asks for a parsed answer; this worker has no model.tool_parser")
        values = json.loads(parse.request)
        kwargs = values["chat_template_kwargs"]
        chat = ChatCompletionRequest.model_validate(
            {"model": "", "messages": [{"role": "user", "content": ""}], **values["request"]}
        )
        # Only counted, by models that number calls over a whole conversation.
        chat.messages = [{"role": "assistant", "tool_calls": [None] * values["num_earlier_calls"]}]
        parser = self._parser_class(
            self._tokenizer, chat.tools, chat_template_kwargs=kwargs, model_config=self._model_config
        )
        num_prompt = len(request.prompt_token_ids) - (continued.num_tokens if continued is not None else 0)
        prompt = list(request.prompt_token_ids[:num_prompt])
        answer = ParsedAnswer(VllmParser(parser, chat, prompt))
        if continued is not None:
            given = request.prompt_token_ids[num_prompt:]
            answer.resume(texts_of(self._tokenizer, prompt, given, params), continued.num_chars, continued.sizes)
        arguments: dict[str, Any] = {}
        if self._reasoning:
            arguments["reasoning_parser_kwargs"] = {"chat_template_kwargs": kwargs}
        if values["reasoning_ended"] is not None:
            arguments["reasoning_ended"] = values["reasoning_ended"]
        return Begun(answer, arguments)


class VllmParser:
    def __init__(self, parser: Any, chat: Any, prompt_token_ids: list[int]) -> None:
        from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls

        self._only_allowed = maybe_filter_parallel_tool_calls
        self._parser = parser
        self._chat = chat
        self._prompt_token_ids = prompt_token_ids

    def feed(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        try:
            message = self._parser.parse_delta(
                text, list(token_ids), self._chat, self._prompt_token_ids, finished=finished
            )
        except Exception as error:
            # Parsers raise any kind of error for unexpected model output.
            log.exception("%s failed on an answer", type(self._parser).__name__)
            raise EngineError(f"the answer cannot be parsed: {type(error).__name__}") from None
        if message is None:
            return None
        message = self._only_allowed(message, self._chat)
        if not (message.content or message.reasoning or message.tool_calls):
            return None
        return AnswerDelta(message.content or "", message.reasoning or "", tuple(map(_call, message.tool_calls or ())))


def _call(call: Any) -> ToolCallDelta:
    function = call.function
    if function is None:
        return ToolCallDelta(call.index, call.id)
    return ToolCallDelta(call.index, call.id, function.name, function.arguments or "")


def texts_of(tokenizer: Any, prompt: Sequence[int], given: Sequence[int], params: Any) -> list[tuple[int, str]]:
    """Tokens with the text each added; `params` are vLLM's, of the whole answer."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    # All fields of a request that the detokenizer reads.
    begun: Any = SimpleNamespace(
        prompt_token_ids=list(prompt), sampling_params=params, prompt_embeds=None, request_id=""
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, begun)
    pieces = []
    for token_id in given:
        detokenizer.update([token_id], False)
        pieces.append((token_id, detokenizer.get_next_output_text(False, True)))
    return pieces
