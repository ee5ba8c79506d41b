"""engine/vllm/plugins/grammar_time.py"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import model_folder

from .support import parameters

pytestmark = pytest.mark.vllm


AMBIGUOUS = ["((a*a*)*(a*a*)*)*b", "((a|aa)*(a|aaa)*)*b"]


class TestGrammarTime:
    """engine/vllm/plugins/grammar_time.py"""

    def test_vllm_still_has_what_is_replaced_and_ends_a_request_whose_grammar_refuses(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

        assert parameters(inspect.unwrap(XgrammarGrammar.accept_tokens)) == ["self", "request_id", "tokens"]
        assert "FINISHED_ERROR" in inspect.getsource(Scheduler.update_from_output)

    @pytest.mark.parametrize("regex", AMBIGUOUS)
    def test_an_ambiguous_grammar_is_ended_before_it_takes_long(
        self, regex: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.v1.structured_output import backend_xgrammar

        from kvferry.engine.vllm.plugins.grammar_time import MAX_TOKEN_S, limit_grammar_time

        accept = inspect.unwrap(backend_xgrammar.XgrammarGrammar.accept_tokens)
        monkeypatch.setattr(backend_xgrammar.XgrammarGrammar, "accept_tokens", accept)
        limit_grammar_time()
        tokenizer, grammar = compiled(regex)
        (token,) = tokenizer.encode("a", add_special_tokens=False)
        num_accepted = 0
        while num_accepted < 2000 and grammar.accept_tokens("r", [token]):
            num_accepted += 1
        assert num_accepted < 2000
        assert grammar.__dict__["kvferry_s"] < 2.0 + 20 * MAX_TOKEN_S


def compiled(regex: str) -> tuple[Any, Any]:
    from vllm.config import ModelConfig
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    from kvferry.engine.vllm.structured_outputs import structured_outputs_config

    folder = str(model_folder.resolve("default"))
    model = ModelConfig(model=folder, tokenizer=folder)
    tokenizer = cached_tokenizer_from_config(model)
    config = SimpleNamespace(
        structured_outputs_config=structured_outputs_config(), model_config=model, speculative_config=None
    )
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=model.get_vocab_size())
    return tokenizer, backend.compile_grammar(StructuredOutputOptions.REGEX, regex)


@pytest.mark.parametrize(
    "structure", [*({"regex": regex} for regex in AMBIGUOUS), {"grammar": 'root ::= (("a"* "a"*)* ("a"* "a"*)*)* "b"'}]
)
def test_ambiguous_grammars_are_refused_before_an_engine_gets_them(structure: dict[str, str]) -> None:
    from kvferry.engine.vllm.grammar_process import grammar_compiler

    compile_spec = grammar_compiler(str(model_folder.resolve("default")), trust_remote_code=False)
    with pytest.raises(ValueError, match="ambiguous"):
        compile_spec(json.dumps(structure))
    for plain in (
        {"regex": "[a-z]+(-[a-z]+)*@([a-z]+[.])+(com|org)"},
        {"json": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}},
        {"choice": ["yes", "no"]},
        {"json_object": True},
    ):
        compile_spec(json.dumps(plain))
