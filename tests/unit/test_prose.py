"""Comments, docstrings and messages of the code in words that a reader who does not know the project understands."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "loadtest", "services", "tests", "tools")
TEXT_FILES = [
    *(ROOT / "Makefile", ROOT / "CONTRIBUTING.md", ROOT / "loadtest" / "README.md"),
    *(file for end in ("*.yaml", "*.tpl", "*.md", "*.txt") for file in (ROOT / "deploy").rglob(end)),
    *(ROOT / "proto").rglob("*.proto"),
]
# Words and what they stood for: tested, separated, fixed, counted as a fault, former, equal, accepted.
PRIVATE_WORDS = re.compile(
    r"\b(?:(?:was|were|been|not) shown|parted|(?<!--)mend(?:s|ed|ing)|told against|of before|as good as"
    r"|(?:is|are|was|were|be|not) taken(?! (?:over|away|down))|(?<!bench-)handoff|the house)\b",
    re.IGNORECASE,
)
# A comment or a docstring without its subject.
FRAGMENT = re.compile(r'(?:# |""")Of (?!course)')
FRAGMENTS_IN = ("bench", "loadtest", "services", "tools")
# A docstring whose first noun is missing, too.
RIDDLE = re.compile(r'"""(?:What|Whoever|Nobody|Those) ')
RIDDLES_IN = ("bench", "loadtest", "tools")
EXEMPT = {Path(__file__), ROOT / "tests" / "unit" / "test_docs.py"}  # they name the words


def prose_of(file: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield comments, docstrings and other strings of a module, of one that has the pattern anywhere."""
    source = file.read_text(encoding="utf-8")
    if pattern.search(source):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.string


def modules_of(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    return [file for file in files if file not in EXEMPT and not file.name.endswith(("_pb2.py", "_pb2_grpc.py"))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_has_no_private_words(folder: str) -> None:
    modules = modules_of(folder)
    assert len(modules) > 10
    found = {
        f"{file.relative_to(ROOT)}: {match}"
        for file in modules
        for text in prose_of(file, PRIVATE_WORDS)
        for match in PRIVATE_WORDS.findall(text)
    }
    assert found == set()


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [*((folder, FRAGMENT) for folder in FRAGMENTS_IN), *((folder, RIDDLE) for folder in RIDDLES_IN)],
)
def test_comments_and_docstrings_begin_with_their_subject(folder: str, pattern: re.Pattern[str]) -> None:
    found = {
        f"{file.relative_to(ROOT)}: {text[:80]}"
        for file in modules_of(folder)
        for text in prose_of(file, pattern)
        if pattern.match(text)
    }
    assert found == set()


@pytest.mark.parametrize("file", TEXT_FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_other_files_have_no_private_words(file: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", file.read_text(encoding="utf-8"))
    assert PRIVATE_WORDS.findall(text) == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("# fp8 was not shown here", True),
        ('"""Which arguments are taken, and why."""', True),
        ("# The command fsck --mend moves files.", False),
        ("# Chunks of a keeper that is gone are taken over.", False),
        ("f'{shown} of {total}'", False),
    ],
)
def test_words_are_found_where_they_are_private(text: str, is_found: bool) -> None:
    assert bool(PRIVATE_WORDS.search(text)) is is_found
