"""engine/vllm/parsing.py"""

from __future__ import annotations

import inspect
import re

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestParsing:
    """engine/vllm/parsing.py"""

    def test_parsers_are_made_and_fed_as_we_do_it(self) -> None:
        from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.parser.abstract_parser import Parser

        from kvferry.engine.vllm.parsing import FIELDS

        assert {"tool_parser_name", "reasoning_parser_name", "enable_auto_tools", "is_harmony", "tokenizer"} <= set(
            parameters(ParserManager.get_parser)
        )
        assert parameters(Parser.__init__)[:3] == ["self", "tokenizer", "tools"]
        assert parameters(Parser.parse_delta) == [
            "self", "delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished",
        ]  # fmt: skip
        assert set(DeltaMessage.model_fields) == {"role", "content", "reasoning", "tool_calls"}
        assert set(DeltaToolCall.model_fields) == {"id", "type", "index", "function"}
        assert set(FIELDS) <= set(ChatCompletionRequest.model_fields)

    def test_the_names_of_parsers_are_known_without_loading_them(self) -> None:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        assert {"hermes", "qwen3_coder", "llama3_json", "pythonic"} <= set(ToolParserManager.list_registered())
        assert {"deepseek_r1", "qwen3", "granite"} <= set(ReasoningParserManager.list_registered())

    def test_the_engine_is_told_where_reasoning_ends(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        assert {"reasoning_ended", "reasoning_parser_kwargs"} <= set(parameters(AsyncLLM.generate))
        assert "reasoning_parser" in parameters(AsyncEngineArgs)

    def test_a_detokenizer_reads_nothing_else_of_a_request(self) -> None:
        from vllm.v1.engine import detokenizer

        source = inspect.getsource(detokenizer)
        assert set(re.findall(r"\brequest\.(\w+)", source)) == {
            "sampling_params", "request_id", "prompt_token_ids", "prompt_embeds",
        }  # fmt: skip
