"""engine/vllm/plugins/seeded_noise.py"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def runner_of(seeds: dict[int, int], lengths: list[int]) -> Any:
    """A model runner with a request in each row, with as many output tokens as `lengths` says."""
    import torch

    names = [f"r{row}" for row in range(len(lengths))]
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=names, generators={row: torch.Generator() for row in seeds}),
        requests={
            name: SimpleNamespace(output_token_ids=[0] * length, sampling_params=SimpleNamespace(seed=seeds.get(row)))
            for row, (name, length) in enumerate(zip(names, lengths, strict=True))
        },
    )


class TestSeededNoise:
    """engine/vllm/plugins/seeded_noise.py"""

    def test_vllm_still_draws_from_one_stream_and_takes_draws_back_by_an_offset(self) -> None:
        """When this fails, the repair may have to change, or can go."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        from kvferry.engine.vllm.plugins import seeded_noise

        assert "generator.manual_seed(sampling_params.seed)" in inspect.getsource(GPUModelRunner._update_states)
        source = inspect.getsource(seeded_noise._own_bookkeeping)
        assert "gen.set_offset(gen.get_offset() - 4)" in source
        assert source.count("generators") == 1
        assert "self.sampler(" in inspect.getsource(seeded_noise._own_sample)

    def test_model_runner_v2_still_draws_by_position(self) -> None:
        from vllm.v1.worker.gpu.sample import gumbel

        assert "def murmur3_hash32(seed, pos, offset" in inspect.getsource(gumbel)

    def test_noise_follows_from_seed_and_position_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from kvferry.engine.vllm.plugins import seeded_noise

        drawn: list[float] = []
        monkeypatch.setattr(
            seeded_noise,
            "_own_sample",
            lambda self: drawn.extend(
                float(torch.rand(1, generator=each)) for each in self.input_batch.generators.values()
            ),
        )

        def draws(seeds: dict[int, int], lengths: list[int]) -> list[float]:
            drawn.clear()
            seeded_noise._sample(runner_of(seeds, lengths))
            return list(drawn)

        first, second = draws({0: 7, 2: -8}, [3, 0, 5])
        assert first != second
        assert draws({1: 7}, [0, 3]) == [first], "of another row, beside others"
        assert draws({0: -8}, [5]) == [second]
        assert len({first, *draws({0: 7}, [4]), *draws({0: 8}, [3]), *draws({0: 73}, [0])}) == 4

    def test_nothing_is_taken_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvferry.engine.vllm.plugins import seeded_noise

        runner = runner_of({0: 1}, [2])
        generators = runner.input_batch.generators
        seen: list[Any] = []
        monkeypatch.setattr(
            seeded_noise, "_own_bookkeeping", lambda self, given: seen.append((given, self.input_batch.generators))
        )
        seeded_noise._bookkeeping_sync(runner, "given")
        assert seen == [("given", {})]
        assert runner.input_batch.generators is generators

        def fail(self: Any) -> None:
            raise RuntimeError

        monkeypatch.setattr(seeded_noise, "_own_bookkeeping", fail)
        with pytest.raises(RuntimeError):
            seeded_noise._bookkeeping_sync(runner)
        assert runner.input_batch.generators is generators
