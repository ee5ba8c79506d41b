"""engine/vllm/sampling.py"""

from __future__ import annotations

import msgspec
import pytest

pytestmark = pytest.mark.vllm


class TestSampling:
    """engine/vllm/sampling.py"""

    def test_every_parameter_is_carried_set_by_us_or_refused(self) -> None:
        from vllm.sampling_params import SamplingParams

        from kvferry.engine.vllm import sampling

        known = {*sampling.CARRIED, *sampling.OURS, *sampling.REFUSED, "structured_outputs"}
        fields = {field.name for field in msgspec.structs.fields(SamplingParams) if not field.name.startswith("_")}
        assert fields == known

    def test_parameters_survive_both_ways(self) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        from kvferry.engine.vllm.sampling import from_vllm, to_vllm

        params = SamplingParams(
            temperature=0.5,
            top_p=0.5,
            top_k=3,
            seed=4,
            stop=["x"],
            max_tokens=9,
            logprobs=2,
            logit_bias={3: 1.0},
            bad_words=["y"],
            structured_outputs=StructuredOutputsParams(regex="a+"),
        )
        sampling = from_vllm(params)
        back = to_vllm(sampling, transfer_params={"do_remote_decode": True})
        assert from_vllm(back) == sampling
        assert back.structured_outputs == params.structured_outputs
        assert back.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}

    def test_what_is_not_carried_is_refused(self) -> None:
        from vllm.sampling_params import SamplingParams

        from kvferry.engine.vllm.sampling import from_vllm
        from kvferry.errors import InvalidRequest

        with pytest.raises(InvalidRequest, match="prompt_logprobs is not supported"):
            from_vllm(SamplingParams(prompt_logprobs=1))
