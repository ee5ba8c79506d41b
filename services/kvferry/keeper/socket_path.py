"""Where engines find the keeper of their node."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvferry.config import TierConfig
from kvferry.errors import TierError

SOCKET = "keeper.sock"
LOCK = "keeper.lock"

# sun_path of Linux, without its zero.
_MAX_PATH_BYTES = 107


def socket_path(config: TierConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Equal for all of a user's processes. Raises TierError for a path too long."""
    if config.socket_dir is not None:
        folder = config.socket_dir
    elif run_dir := environ.get("KVFERRY_RUN_DIR"):
        folder = Path(run_dir) / "keeper"
    else:
        root = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
        folder = root / f"kvferry-{os.geteuid()}"
    path = folder / SOCKET
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise TierError(f"tier.socket_dir: {path} is longer than the {_MAX_PATH_BYTES} bytes of a socket's address")
    return path


def make_private(folder: Path) -> None:
    """Make the socket's folder. Raises TierError if other users may enter it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise TierError(f"tier.socket_dir: {folder}: {error.strerror}") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise TierError(f"tier.socket_dir: others may enter {folder}; allow it to its owner only (chmod 700)")
