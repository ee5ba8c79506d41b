"""engine/vllm/start/model_inspection.py"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm


def test_a_class_is_inspected_without_another_process_and_the_result_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import registry

    from kvferry.engine.vllm.start.model_inspection import inspect_models_in_this_process

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("another process")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)  # put back afterwards
    monkeypatch.setattr(registry, "subprocess", SimpleNamespace(run=refuse))
    model = registry.ModelRegistry.models["LlamaForCausalLM"]
    inspect_models_in_this_process()
    # Whether vLLM still asks by the name that is replaced.
    assert registry._run_in_subprocess.__module__ == "kvferry.engine.vllm.start.model_inspection"
    assert model.inspect_model_cls() == registry._ModelInfo.from_model_cls(model.load_model_cls())
    assert list(tmp_path.glob("modelinfos/*.json")), "processes that start later read it"
