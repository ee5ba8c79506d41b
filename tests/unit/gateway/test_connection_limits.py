"""The limit of open files is raised for connections as far as the process may."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.child_imports import import_environment

PROGRAM = """
import logging, resource, sys
from kvferry.gateway.http.connection_limits import raise_descriptor_limit
logging.basicConfig(stream=sys.stdout)
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_descriptor_limit(1000), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "fits", "raised", "warns"),
    [
        (256, 4000, 1000, 1512, False),
        (256, 812, 300, 812, True),
        (256, 300, 1, 300, True),
        (2000, 4000, 1000, 2000, False),
    ],
)
def test_the_limit_of_open_files(soft: int, hard: int, fits: int, raised: int, warns: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(soft), str(hard)],
        capture_output=True, text=True, check=True, env=import_environment(),
    )  # fmt: skip
    *warnings, last = done.stdout.splitlines()
    assert last == f"{fits} {raised} {hard}"
    assert bool(warnings) == warns
    if warns:
        assert f"this process may open {raised} files" in warnings[0]
