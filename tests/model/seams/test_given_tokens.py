"""engine/vllm/plugins/given_tokens.py"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm

PROMPT, GIVEN = [1, 2, 3], [4, 5]
THINK_END = 9


def params(num_given: int = len(GIVEN)) -> Any:
    from kvferry.engine.vllm.sampling import NUM_GIVEN

    return SimpleNamespace(extra_args={NUM_GIVEN: num_given} if num_given else None)


class TestGivenTokens:
    """engine/vllm/plugins/given_tokens.py"""

    def test_vllm_still_has_what_is_replaced(self) -> None:
        from vllm.v1.core.sched import scheduler, utils
        from vllm.v1.core.sched.output import NewRequestData
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
        from vllm.v1.worker import gpu_model_runner
        from vllm.v1.worker.gpu import model_runner

        # Limits, and what workers are told that they should have.
        assert "request.num_output_tokens >= request.max_tokens" in inspect.getsource(utils.check_stop)
        assert "req.num_output_tokens + req.num_output_placeholders" in inspect.getsource(scheduler)
        # Model runner V1.
        source = inspect.getsource(gpu_model_runner.GPUModelRunner._update_states)
        assert source.count("= CachedRequestState(\n") == 1
        assert "output_token_ids=[]" in source
        assert "num_output_tokens < len(req_state.output_token_ids)" in source
        # Model runner V2.
        assert isinstance(inspect.getattr_static(NewRequestData, "prompt_len"), property)
        source = inspect.getsource(model_runner.GPUModelRunner.add_requests)
        assert "prompt_len = new_req_data.prompt_len" in source
        assert "all_token_ids=new_req_data.prefill_token_ids" in source
        # Grammars.
        assert parameters(inspect.unwrap(StructuredOutputManager._create_grammar)) == ["self", "request"]
        assert "self._create_grammar" in inspect.getsource(StructuredOutputManager.grammar_init)
        assert parameters(StructuredOutputGrammar.accept_tokens) == ["self", "request_id", "tokens"]

    def test_a_scheduler_counts_given_tokens_as_output(self) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.utils import check_stop
        from vllm.v1.request import Request

        from kvferry.engine.vllm.plugins.given_tokens import count_given_tokens
        from kvferry.engine.vllm.sampling import NUM_GIVEN

        count_given_tokens()
        create = count_given_tokens.__globals__["StructuredOutputManager"]._create_grammar
        count_given_tokens()
        assert count_given_tokens.__globals__["StructuredOutputManager"]._create_grammar is create

        def request(**changes: Any) -> Request:
            sampling = SamplingParams(max_tokens=4, **changes)
            sampling.update_from_generation_config({}, 0)
            return Request("r", [*PROMPT, *GIVEN], sampling, None)

        whole, rest = request(), request(extra_args={NUM_GIVEN: len(GIVEN)})
        assert (whole.num_output_tokens, rest.num_output_tokens) == (0, 2)
        assert rest.num_prompt_tokens == 5
        for each in (whole, rest):
            each.append_output_token_ids([7, 8])
        assert not check_stop(whole, 100)
        assert check_stop(rest, 100)

    def test_both_model_runners_take_given_tokens_for_output(self) -> None:
        from vllm.v1.core.sched.output import NewRequestData

        from kvferry.engine.vllm.plugins import given_tokens

        fields: dict[str, Any] = {
            "req_id": "r",
            "mm_features": [],
            "sampling_params": params(),
            "pooling_params": None,
            "block_ids": ([],),
            "num_computed_tokens": 0,
            "lora_request": None,
        }
        more = {"generator": None, "output_token_ids": []}
        state = given_tokens._state(prompt_token_ids=[*PROMPT, *GIVEN], **fields, **more)
        assert (state.prompt_token_ids, state.output_token_ids) == (PROMPT, GIVEN)
        assert (state.num_prompt_tokens, state.num_tokens) == (3, 5)
        new = given_tokens._state(prompt_token_ids=PROMPT, **{**fields, "sampling_params": params(0)}, **more)
        assert (new.prompt_token_ids, new.output_token_ids) == (PROMPT, [])
        told = NewRequestData(prompt_token_ids=[*PROMPT, *GIVEN], **fields)
        assert given_tokens._prompt_len(told) == len(PROMPT)
        told.sampling_params = None
        assert given_tokens._prompt_len(told) == 5

    @pytest.mark.parametrize(
        ("reasons", "prompt", "given", "constrained", "has_ended"),
        [
            (False, PROMPT, [4, 5, 6], [4, 5, 6], True),
            (True, PROMPT, [4, 5, 6], [], False),
            (True, PROMPT, [4, THINK_END, 5, 6], [5, 6], True),
            (True, PROMPT, [4, THINK_END], [], True),
            (True, PROMPT, [4, THINK_END, 5, THINK_END], [5, THINK_END], True),
            (True, [*PROMPT, THINK_END], [4, 5], [4, 5], True),
        ],
    )
    def test_a_grammar_begins_after_the_reasoning(
        self, reasons: bool, prompt: list[int], given: list[int], constrained: list[int], has_ended: bool
    ) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        from kvferry.engine.vllm.plugins.given_tokens import _replaying

        class Reasoner:
            def is_reasoning_end(self, token_ids: list[int]) -> bool:
                return THINK_END in token_ids

            def is_reasoning_end_streaming(self, token_ids: list[int], delta_ids: list[int]) -> bool:
                return THINK_END in delta_ids

        accepted: list[int] = []
        grammar = SimpleNamespace(accept_tokens=lambda _, tokens: accepted.extend(tokens) is None)
        manager: Any = SimpleNamespace(
            enable_in_reasoning=False, reasoner_cls=object() if reasons else None, tokenizer=None
        )
        manager._get_reasoner = lambda request: Reasoner() if reasons else None
        manager._get_constraint_bounds = StructuredOutputManager._get_constraint_bounds.__get__(manager)
        structured = SimpleNamespace(reasoning_ended=None)
        request = SimpleNamespace(
            request_id="r",
            prompt_token_ids=[*prompt, *given],
            sampling_params=params(len(given)),
            structured_output_request=structured,
        )
        assert _replaying(lambda manager, request: grammar)(manager, request) is grammar
        assert accepted == constrained
        assert structured.reasoning_ended is has_ended

    def test_tokens_that_do_not_fit_are_an_error(self) -> None:
        from kvferry.engine.vllm.plugins.given_tokens import _replaying

        grammar = SimpleNamespace(accept_tokens=lambda *_: False)
        manager = SimpleNamespace(_get_constraint_bounds=lambda *_, **__: SimpleNamespace(grammar_start=0))
        request = SimpleNamespace(
            request_id="r",
            prompt_token_ids=[*PROMPT, *GIVEN],
            sampling_params=params(),
            structured_output_request=SimpleNamespace(reasoning_ended=None),
        )
        with pytest.raises(ValueError, match="do not fit the request's grammar"):
            _replaying(lambda manager, request: grammar)(manager, request)
