"""The volumes of a keeper."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvferry.errors import TierError
from kvferry_keeper.keeper import Keeper
from support.tier_keeper import open_volumes, tier_config


async def test_a_volume_and_its_copy_are_refused_by_name(tmp_path: Path) -> None:
    for volume in open_volumes(tier_config(tmp_path, 1)):
        volume.close()
    shutil.copytree(tmp_path / "v0", tmp_path / "v1")
    config = tier_config(tmp_path, 2)
    volumes = open_volumes(config)
    keeper = Keeper(config, volumes)
    with pytest.raises(TierError, match=f"{tmp_path}/v1 is a copy of {tmp_path}/v0: .*remove volume.json"):
        await keeper.start()
    assert await keeper.stop()
    for volume in volumes:
        volume.close()
    (tmp_path / "v1" / "volume.json").unlink()
    volumes = open_volumes(config)
    keeper = Keeper(config, volumes)
    await keeper.start()
    assert len(keeper.stats.volumes) == 2
    assert await keeper.stop()
    for volume in volumes:
        volume.close()
