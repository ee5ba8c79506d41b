"""engine/vllm/start/engine_folder.py"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from kvferry.engine.vllm.start.engine_folder import EngineFolder

PROGRAM = """
import signal, sys
from pathlib import Path
from kvferry.engine.vllm.start.engine_folder import EngineFolder

folder = EngineFolder(Path(sys.argv[1]))
(folder.path / "adapters").mkdir()
print(folder.path, flush=True)
signal.pause()
"""


def test_a_killed_workers_folder_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        own = EngineFolder(tmp_path)
        assert (left / "adapters").is_dir()
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    assert left.is_dir()
    later = EngineFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted((own.path, later.path))
    for folder in (own, later, own):
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_what_is_no_folder_of_ours_stays(tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "lock").touch()
    (parent := tmp_path / "parent").mkdir()
    (parent / "engine-of-an-earlier-release").mkdir()
    (parent / "engine-link").symlink_to(outside)
    (with_pipe := parent / "engine-pipe").mkdir()
    os.mkfifo(with_pipe / "lock.new")
    (parent / "engine-file").touch()
    EngineFolder(parent).remove()
    assert len(list(parent.iterdir())) == 4
    assert (outside / "lock").exists()


def test_a_run_folder_that_is_not_there_yet_is_made_and_is_private(tmp_path: Path) -> None:
    parent = tmp_path / "run" / "r"
    folder = EngineFolder(parent)
    try:
        assert parent.stat().st_mode & 0o777 == 0o700
    finally:
        folder.remove()
    assert parent.is_dir()


@pytest.mark.parametrize(("named", "depth", "expected"), [("", 0, True), ("/operators", 0, False), ("", 90, False)])
def test_vllms_sockets_lie_in_it_where_their_names_fit(
    monkeypatch: pytest.MonkeyPatch, named: str, depth: int, expected: bool
) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_RPC_BASE_PATH": named} if named else {})
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="k") as parent:
        folder = EngineFolder(Path(parent) / ("d" * depth))
        with folder.holds_sockets():
            assert os.environ.get("VLLM_RPC_BASE_PATH", "") == (str(folder.path) if expected else named)
            if expected:
                assert len(f"{folder.path}/{uuid.uuid4()}") <= 107
        assert os.environ.get("VLLM_RPC_BASE_PATH", "") == named
        folder.remove()
