"""A draft model that cannot be had is named with the key that its `speculative_config` stands in."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.config import EngineConfig
from kvferry.engine.vllm.start import draft_model
from kvferry.errors import ConfigError


@pytest.mark.parametrize("keys", [{}, {"speculative_config": "models[chat].engine.args.speculative_config"}])
def test_a_folder_that_is_missing_is_named_with_its_key(keys: dict[str, str], tmp_path: Path) -> None:
    missing = str(tmp_path / "draft")
    drafts = {"method": "draft_model", "model": missing, "num_speculative_tokens": 3}
    with pytest.raises(ConfigError) as caught:
        draft_model.find(EngineConfig(args={"speculative_config": drafts}), tmp_path, keys)
    key = f"{keys.get('speculative_config', 'engine.args.speculative_config')}.model"
    assert caught.value.message.startswith(f"{key}: {missing!r} is not a folder with a config.json")
    assert caught.value.param == key
    assert draft_model.find(EngineConfig(), tmp_path, keys) is None


def test_engines_have_all_settings_of_drafts_in_common_but_their_number_and_the_folder() -> None:
    draft = draft_model.DraftModel("/models/d", "0" * 32)
    config = {"method": "eagle3", "model": "owner/d", "num_speculative_tokens": 3, "quantization": "fp8"}
    assert draft.for_digest(config) == {"method": "eagle3", "model": "0" * 32, "quantization": "fp8"}
    assert draft.for_engine(config, producer=False) == {**config, "model": "/models/d"}
    assert draft.for_engine(config, producer=True) == {**config, "model": "/models/d", "num_speculative_tokens": 1}
    trained = {"method": "dflash", "model": "owner/d", "num_speculative_tokens": 7}
    assert draft.for_engine(trained, producer=True) == {**trained, "model": "/models/d"}
