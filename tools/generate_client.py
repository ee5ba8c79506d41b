"""Generate the synchronous client from the asynchronous one, or with --check fail when the committed one differs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from generated_pages import write_or_check
from unasync import Rule, unasync_files

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "services" / "kvferry_client" / "asynchronous.py"
TARGET = SOURCE.with_name("synchronous.py")
HEADER = "# Generated from asynchronous.py by tools/generate_client.py: change that file, and run `make client`.\n"
NAMES = {"aiter": "iter", "anext": "next", "AsyncAnswerStream": "AnswerStream", "AsyncClient": "Client"}
# What are no names: of docstrings, and paths of modules.
TEXTS = {
    "The client for asyncio.": "The client for synchronous code.",
    "its `async with`": "its `with`",
    "A connection to one endpoint, bound to the running event loop; `close` it, or use it in an `async with`.": (
        "A connection to one endpoint. Thread-safe; `close` it, or use it in a `with`."
    ),
    "<AsyncClient of": "<Client of",
    "grpc.aio.": "grpc.",
}


def generated(source: str) -> str:
    """Return the synchronous code. Raises ValueError for a text of TEXTS that the source does not have."""
    for text, other in TEXTS.items():
        if text not in source:
            raise ValueError(f"{SOURCE.name} has no {text!r} any more: change TEXTS")
        source = source.replace(text, other)
    with tempfile.TemporaryDirectory() as folder:
        before, after = (Path(folder) / name for name in ("before", "after"))
        before.mkdir()
        (before / TARGET.name).write_text(source, encoding="utf-8")
        unasync_files([str(before / TARGET.name)], [Rule(f"{before}/", f"{after}/", additional_replacements=NAMES)])
        code = (after / TARGET.name).read_text(encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "format", "--quiet", f"--stdin-filename={TARGET}", "-"]
    ended = subprocess.run(ruff, input=HEADER + code, capture_output=True, text=True, check=True, cwd=ROOT)
    return ended.stdout


def main() -> int:
    text = generated(SOURCE.read_text(encoding="utf-8"))
    return write_or_check({TARGET: text}, source=SOURCE.name, target="client", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
