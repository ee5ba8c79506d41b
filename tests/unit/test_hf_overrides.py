"""`model.hf_overrides`: typed, bounded, whole, and part of what both ends of a link compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry import config as configuration
from kvferry.config import MAX_CONTEXT, ClusterConfig
from kvferry.errors import ConfigError
from kvferry.link.identity import why_incompatible
from kvferry.link.served_model import identity

ROPE = {"factor": 4, "original_max_position_embeddings": 32768}


def parsed(rope: dict[str, Any] | None = None, **sections: Any) -> ClusterConfig:
    overrides = {"rope_parameters": ROPE if rope is None else rope}
    model = {"path": "m", "hf_overrides": overrides, **sections.pop("model", {})}
    return configuration.parse({"model": model, **sections})


def test_the_context_is_what_the_rotations_reach() -> None:
    config = parsed()
    assert config.model.hf_overrides.values(1e6) == {
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **ROPE},
    }
    assert configuration.parse({}).model.hf_overrides.values(1e6) == {}
    assert configuration.parse(config.model_dump()) == config
    assert config.of_model().model.hf_overrides == config.model.hf_overrides


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rope": {"factor": 4.0}}, "original_max_position_embeddings: missing"),
        ({"rope": {"original_max_position_embeddings": 4096}}, "factor: missing"),
        ({"rope": {**ROPE, "beta_fast": 32}}, "beta_fast"),
        ({"rope": {**ROPE, "factor": 1}}, "factor"),
        ({"rope": {**ROPE, "factor": 65}}, "factor"),
        ({"rope": {**ROPE, "factor": float("nan")}}, "factor"),
        ({"rope": {**ROPE, "original_max_position_embeddings": 63}}, "original_max_position_embeddings"),
        ({"rope": {**ROPE, "original_max_position_embeddings": MAX_CONTEXT // 4 + 1}}, f"{MAX_CONTEXT} is the limit"),
        ({"model": {"max_model_len": 131073}}, "max_model_len (131073): expected at most 131072, the context of"),
        (
            {"engine": {"args": {"hf_overrides": {"a": 1}}}},
            "vLLM takes one of the two",
        ),
        ({"engine": {"quality_report": "/r.json"}}, "engine.quality_report: with model.hf_overrides"),
    ],
)
def test_what_is_not_taken_is_named(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**sections)
    assert words in caught.value.message
    assert len(caught.value.message) < 1000


def test_the_largest_context_is_taken() -> None:
    largest = {**ROPE, "original_max_position_embeddings": MAX_CONTEXT // 4}
    assert parsed(largest).model.hf_overrides.context == MAX_CONTEXT


def test_quality_is_not_measured_with_overrides() -> None:
    from kvferry_plan.quality.measure import Settings, measure
    from kvferry_plan.quality.samples import load_dataset

    with pytest.raises(ConfigError, match=r"model\.hf_overrides: a report says nothing of them"):
        next(measure(parsed(), Settings(("fp8",), "auto", (), 1, 1, 1, 1.0, 1.0), load_dataset(None), print))


def test_models_of_a_cluster_have_overrides_of_their_own() -> None:
    entry = {"name": "long", "model": {"path": "m2", "hf_overrides": {"rope_parameters": ROPE}}}
    config = configuration.parse({"model": {"path": "m"}, "models": [entry]})
    assert config.of_model("long").model.hf_overrides.context == 131072
    assert config.of_model().model.hf_overrides.context == 0
    entry["engine"] = {"quality_report": "/r.json"}
    with pytest.raises(ConfigError, match=r"^models\[0\]\.engine\.quality_report: with models\[0\]\.model\.hf_ov"):
        configuration.parse({"model": {"path": "m"}, "models": [entry]})


def test_ends_with_other_overrides_do_not_work_together(tmp_path: Path) -> None:
    plain = identity(configuration.parse({"model": {"path": "m", "revision": "r"}}), str(tmp_path))
    ours, theirs = (
        identity(parsed({**ROPE, "factor": factor}, model={"revision": "r"}), str(tmp_path)) for factor in (4, 2)
    )
    assert why_incompatible(ours, ours) == ""
    assert '"factor":2.0' in why_incompatible(ours, theirs)
    for own, peer in ((plain, ours), (ours, plain)):
        assert "its model.hf_overrides is " in why_incompatible(own, peer)


def test_simulated_engines_have_no_context_of_overrides(tmp_path: Path) -> None:
    config = parsed(engine={"kind": "sim"})
    assert identity(config, str(tmp_path)).model.overrides == ""
