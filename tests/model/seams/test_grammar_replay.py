"""engine/vllm/plugins/grammar_replay.py"""

from __future__ import annotations

import inspect

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestGrammarReplay:
    """engine/vllm/plugins/grammar_replay.py"""

    def test_vllm_still_has_what_is_replaced(self) -> None:
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

        create = inspect.unwrap(StructuredOutputManager._create_grammar)
        assert parameters(create) == ["self", "request"]
        assert "self._create_grammar" in inspect.getsource(StructuredOutputManager.grammar_init)
        assert "reasoner_cls" in inspect.getsource(StructuredOutputManager.__init__)
        assert parameters(StructuredOutputGrammar.accept_tokens) == ["self", "request_id", "tokens"]
