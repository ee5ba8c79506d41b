"""Where engines find their keeper."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.config import TierConfig
from kvferry.errors import TierError
from kvferry.keeper.unix_socket import make_private, socket_path


def test_what_is_configured_comes_first(tmp_path: Path) -> None:
    config = TierConfig(socket_dir=tmp_path)
    assert socket_path(config, {"KVFERRY_RUN_DIR": "/elsewhere"}) == tmp_path / "keeper.sock"
    assert socket_path(TierConfig(), {"KVFERRY_RUN_DIR": "/run/c"}) == Path("/run/c/keeper/keeper.sock")
    assert socket_path(TierConfig(), {}).parent.name.startswith("kvferry-")


def test_a_path_that_is_no_address_is_refused() -> None:
    with pytest.raises(TierError, match="107 bytes"):
        socket_path(TierConfig(), {"KVFERRY_RUN_DIR": "/x" * 60})


def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    make_private(folder)
    folder.chmod(0o750)
    with pytest.raises(TierError, match="others may enter"):
        make_private(folder)
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="file"):
        make_private(tmp_path / "file" / "b")
