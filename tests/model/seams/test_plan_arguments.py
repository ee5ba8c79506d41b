"""What `kvferry plan` says of vLLM's options, against vLLM's argument parser."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvferry_plan.planner import emit, engine_settings, kv_dtypes, plan
from support.plan_questions import question


@pytest.fixture(scope="module")
def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "disaggregated", "kv_cache_dtype": "fp8", "users": 128},
        {"mode": "aggregated", "cpu_tier_bytes": 64 << 30},
        {"model": "qwen3-30b-a3b", "gpus": ("h200",), "tensor_parallel_size": 4, "pipeline_parallel_size": 2},
        {"gpus": ("cpu-node",), "block_size": 32, "tpot_s": 1.0, "ttft_s": 30.0, "context": 1024},
    ],
    ids=["prefill and decode", "CPU tier", "pipeline and experts", "CPU node"],
)
def test_the_parser_takes_what_is_emitted(options: dict[str, Any], parser: Any) -> None:
    asked = question(**options)
    for candidate in plan.make(asked).candidates[:8]:
        for role in ("prefill", "decode") if candidate.disaggregated else ("",):
            arguments = emit.vllm_arguments(candidate, asked, role=role)
            parsed = parser.parse_args(arguments)
            assert parsed.tensor_parallel_size == candidate.layout.tensor_parallel_size
            assert parsed.pipeline_parallel_size == candidate.layout.pipeline_parallel_size
            assert parsed.enable_expert_parallel is candidate.layout.expert_parallel
            assert parsed.max_model_len == asked.demand.context_tokens
            assert parsed.kv_cache_dtype == asked.kv_cache_dtype
            assert parsed.max_num_seqs == emit.max_num_seqs(candidate, asked)
            if role:
                assert parsed.kv_transfer_config.kv_role == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]


def test_an_argument_that_vllm_lacks_would_be_noticed(parser: Any) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--swap-space", "4"])


def options_of(parser: Any) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_counterparts_of_vllm_are_its_options(parser: Any) -> None:
    named = {each.vllm for each in engine_settings.COUNTERPARTS if each.vllm}
    assert named <= options_of(parser)


def test_published_options_of_vllm_hold_where_the_parser_has_them(parser: Any) -> None:
    """A published flag is gone if and only if vLLM's parser lacks it."""
    known = options_of(parser)
    flags = [each for each in engine_settings.published() if each.engine == "vLLM" and each.setting.startswith("--")]
    assert len(flags) >= 12
    for each in flags:
        option = re.split(r"[ ,]", each.setting)[0]
        assert (option in known) is (each.fate != "gone"), each


def test_dtypes_of_the_planner_are_vllms() -> None:
    from typing import get_args

    from vllm.config.cache import CacheDType

    assert set(kv_dtypes.KNOWN) - {"float32"} <= set(get_args(CacheDType))


def test_vllm_refuses_heads_that_do_not_divide() -> None:
    """The planner's rule of tensor parallelism is vLLM's: its message, read in the source that is installed."""
    import inspect

    from vllm.config import ModelConfig

    source = inspect.getsource(ModelConfig.verify_with_parallel_config)
    assert "total_num_attention_heads % tensor_parallel_size != 0" in source
