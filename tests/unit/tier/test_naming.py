"""Paths of pages, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_pages import LAYOUT, page

from kvferry.tier import naming
from kvferry.tier.layout import LayoutDigest, Namespace, PageId, PageKey

PAGES = st.builds(
    PageId,
    st.binary(min_size=36, max_size=36).map(PageKey),
    st.integers(0, 2**64 - 1),
    st.builds(Namespace, st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True), st.integers(0, 2**64 - 1)),
)
DIGESTS = st.binary(min_size=16, max_size=16).map(LayoutDigest)


@given(PAGES, DIGESTS)
def test_a_path_says_everything_that_names_a_page(of: PageId, layout: LayoutDigest) -> None:
    root, writer, digest, namespace, fan_out, name = naming.page_path("node-1", layout, of).split("/")
    assert (root, writer) == ("pages", "node-1")
    assert naming.parse_layout_name(digest) == layout
    parsed = naming.parse_namespace(namespace)
    assert parsed == of.namespace
    assert naming.parse_page_name(name, parsed) == of
    assert fan_out == name[:2]
    assert len(name) < 255


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x.page",
        naming.page_name(page(1)) + ".tmp",
        naming.page_name(page(1)).upper(),
        naming.page_name(page(1)).replace("-", "_"),
        naming.page_name(page(1))[2:],
        naming.page_name(page(1)) + "\n",
    ],
)
def test_a_foreign_name_is_none(name: str) -> None:
    assert naming.parse_page_name(name, Namespace()) is None


@pytest.mark.parametrize("name", ["", "x", LAYOUT.digest.hex()[1:], LAYOUT.digest.hex().upper() + "A", "lost+found"])
def test_a_foreign_folder_is_none(name: str) -> None:
    assert naming.parse_layout_name(name) is None
    assert naming.parse_namespace(name) is None


@pytest.mark.parametrize("writer", ["", ".", "..", "a/b", "-a", "a" * 101, "ä", "a\n"])
def test_a_writer_is_a_folders_name(writer: str) -> None:
    with pytest.raises(ValueError, match="writer"):
        naming.check_writer(writer)
