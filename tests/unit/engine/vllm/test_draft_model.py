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
