"""Pages of docs/: short enough to read, listed in the index, with links that lead to a page and its heading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
PAGES = sorted(DOCS.rglob("*.md"))
# Besides the pages themselves, files whose links and names of pages are followed.
LINKING = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
    *PAGES,
    *(page for folder in ("deploy", "loadtest") for page in (ROOT / folder).rglob("*.md")),
]
FOLDERS = ("bench", "deploy", "loadtest", "proto", "services", "tests", "tools")
MAX_WORDS = 2_500
# Words that a reader who does not know the project misreads: tested, separated, corrected, counted as a fault, former.
PRIVATE_WORDS = ("was shown", "were shown", "not shown", "parted", "mended", "told against", "of before", "as good as")
_FENCE = re.compile(r"(?ms)^```.*?^```$")
_GENERATED_TABLE = re.compile(r"(?s)<!-- (?:table|rendered from) [^>]*-->.*?<!-- end -->")


def is_generated(text: str) -> bool:
    """Return whether a page says in its first lines that it is generated, and from what."""
    return re.match(r"(?s)# [^\n]+\n\nGenerated from `(?:(?!\n\n).)*? by `make [a-z-]+`", text) is not None


def slugs_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.+)$", _FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def links_of(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield file and anchor of each relative link."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_no_longer_than_a_reader_reads(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    written = _GENERATED_TABLE.sub("", text)
    assert is_generated(text) or len(written.split()) <= MAX_WORDS


def test_pages_that_are_exempt_are_those_that_tools_write() -> None:
    generated = {str(page.relative_to(DOCS)) for page in PAGES if is_generated(page.read_text(encoding="utf-8"))}
    names = ("configuration", "engine-arguments", "headroom", "metrics")
    assert generated == {f"operator/{name}.md" for name in names}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_prose_has_no_private_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"`[^`]*`", "", _FENCE.sub("", text))
    assert is_generated(text) or re.findall(rf"\b(?:{'|'.join(PRIVATE_WORDS)})\b", prose) == []


def test_each_page_has_one_line_in_the_index() -> None:
    lines = [line for line in INDEX.read_text(encoding="utf-8").splitlines() if line.startswith("- [")]
    listed = [re.findall(r"\]\(([^)]+)\)", line) for line in lines]
    assert all(len(links) == 1 for links in listed)
    pages = sorted(str(page.relative_to(DOCS)) for page in PAGES if page != INDEX)
    assert sorted(link for links in listed for link in links) == pages


def test_links_lead_to_a_file_and_a_heading() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in LINKING
        for target, anchor in links_of(page)
        if not target.exists()
        or (anchor and target.suffix == ".md" and anchor not in slugs_of(target.read_text(encoding="utf-8")))
    ]
    assert broken == []


def test_pages_that_code_and_errors_name_exist() -> None:
    files = [ROOT / "Makefile", ROOT / "pyproject.toml", *LINKING]
    files += [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    named = 0
    wrong = []
    for file in files:
        if "__pycache__" in file.parts:
            continue
        text = file.read_bytes().decode("utf-8", errors="replace")
        for name, _, anchor in re.findall(r"(?<![\w/])docs/([\w./-]+\.md)(#([\w-]+))?", text):
            page = DOCS / name
            named += 1
            if not page.is_file() or (anchor and anchor not in slugs_of(page.read_text(encoding="utf-8"))):
                wrong.append(f"{file.relative_to(ROOT)}: docs/{name}")
    assert wrong == []
    assert named > 50
