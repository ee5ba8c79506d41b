"""kvferry_plan/quality/forced_tokens.py and run.py"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


def test_distributions_are_written_and_the_text_is_forced(tmp_path: Path) -> None:
    import numpy as np
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    from kvferry_plan.quality.forced_tokens import FORCED, ForcedTokens

    file = tmp_path / "rows.npy"
    np.save(file, np.zeros((2, 4), dtype=np.float32))
    processor = ForcedTokens(None, torch.device("cpu"), False)
    assert not processor.is_argmax_invariant()
    forced = SamplingParams(extra_args={FORCED: {"file": str(file), "tokens": [2, 0]}})
    answer: list[int] = []
    processor.update_state(
        BatchUpdate(
            batch_size=2, removed=[], added=[(0, SamplingParams(), [1], []), (1, forced, [1], answer)], moved=[]
        )
    )
    given = torch.tensor([[0.0, 1, 2, 3, 9], [3.0, 2, 1, 0, 5]])
    # The vocabulary of the file may be smaller than the padded one of the engine.
    expected = torch.log_softmax(given[1], dim=-1)[:4].numpy()
    for position, token in enumerate([2, 0]):
        # A prompt in two chunks: the first one's logits are overwritten.
        for logits in (torch.rand(2, 5), given.clone()) if position == 0 else (given.clone(),):
            result = processor.apply(logits)
        assert result.argmax(dim=-1).tolist()[1] == token
        assert torch.equal(result[0], given[0])  # of requests that are not forced
        answer.append(token)
        np.testing.assert_allclose(np.load(file)[position], expected, rtol=1e-6)


def test_vllm_still_takes_it() -> None:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    assert "logits_processors" in parameters(LLM.__init__)
    assert {"async_scheduling", "enable_prefix_caching", "worker_extension_cls"} <= set(parameters(EngineArgs))
    assert {"extra_args", "detokenize", "ignore_eos"} <= set(parameters(SamplingParams))
    assert "output_ids" in inspect.getsource(AdapterLogitsProcessor)


def test_vllms_cpu_attention_has_the_types_that_obstacles_names() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from kvferry.pages.geometry.kv_dtypes import kv_dtype
    from kvferry_plan.quality.obstacles import _ON_CPU

    theirs = {kv_dtype(name).name for name in CPUAttentionBackend.supported_kv_cache_dtypes if name != "auto"}
    assert theirs <= set(_ON_CPU)
    assert {"fp8_e4m3", "fp8_e5m2"} <= theirs
