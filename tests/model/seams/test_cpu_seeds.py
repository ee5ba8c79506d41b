"""engine/vllm/plugins/cpu_seeds.py"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.vllm


class TestCpuSeeds:
    """engine/vllm/plugins/cpu_seeds.py"""

    def test_vllm_still_takes_draws_back_by_an_offset(self) -> None:
        """When this fails, the repair may have to change, or can go."""
        from kvferry.engine.vllm.plugins import cpu_seeds

        source = inspect.getsource(cpu_seeds._own)
        assert "gen = self.input_batch.generators.get(int(i))" in source
        assert "gen.set_offset(gen.get_offset() - 4)" in source
        assert "self.discard_request_mask.np[:num_reqs]" in source
        assert source.count("generators") == 1

    def test_generators_of_the_cpu_still_have_no_offset(self) -> None:
        import torch

        with pytest.raises(RuntimeError, match="does not use offset"):
            torch.Generator().get_offset()

    def test_draws_of_an_unfinished_prompt_are_taken_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from kvferry.engine.vllm.plugins import cpu_seeds

        generators = {row: torch.Generator().manual_seed(row) for row in (0, 2)}
        runner: Any = SimpleNamespace(
            input_batch=SimpleNamespace(num_reqs=3, req_ids=["a", "b", "c"], generators=generators),
            requests={name: SimpleNamespace() for name in "abc"},
            discard_request_mask=SimpleNamespace(np=np.array([False, False, False, True])),
        )
        seen: list[set[int]] = []
        monkeypatch.setattr(cpu_seeds, "_own", lambda self: seen.append(set(self.input_batch.generators)))

        def step(*unfinished: int) -> list[float]:
            runner.discard_request_mask.np[:3] = [row in unfinished for row in range(3)]
            drawn = [float(torch.rand(1, generator=generators[row])) for row in (0, 2)]
            cpu_seeds._bookkeeping_sync(runner)
            return drawn

        expected = [
            [float(each) for each in torch.rand(3, generator=torch.Generator().manual_seed(row))] for row in (0, 2)
        ]
        drawn = [step(2), step(0, 1, 2), step(), step(0)]
        assert [row[0] for row in drawn] == [expected[0][0], expected[0][1], expected[0][1], expected[0][2]]
        assert [row[1] for row in drawn] == [expected[1][0], expected[1][0], expected[1][0], expected[1][1]]
        assert seen == [{0}, set(), {0, 2}, {2}]
        assert set(generators) == {0, 2}
