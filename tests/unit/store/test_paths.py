"""Paths of chunks, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.keeper.layout import ChunkId, ChunkKey, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import paths
from support.tier_chunks import LAYOUT, chunk

CHUNKS = st.builds(
    ChunkId,
    st.binary(min_size=36, max_size=36).map(ChunkKey),
    st.integers(0, 2**64 - 1),
    st.builds(Namespace, st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True), st.integers(0, 2**64 - 1)),
)
DIGESTS = st.binary(min_size=16, max_size=16).map(LayoutDigest)


@given(CHUNKS, DIGESTS)
def test_a_path_says_everything_that_names_a_chunk(of: ChunkId, layout: LayoutDigest) -> None:
    root, writer, digest, namespace, fan_out, name = paths.chunk_path("node-1", layout, of).split("/")
    assert (root, writer) == ("pages", "node-1")
    assert paths.parse_layout_name(digest) == layout
    parsed = paths.parse_namespace(namespace)
    assert parsed == of.namespace
    assert paths.parse_chunk_name(name, parsed) == of
    assert fan_out == name[:2]
    assert len(name) < 255


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x.page",
        paths.chunk_name(chunk(1)) + ".tmp",
        paths.chunk_name(chunk(1)).upper(),
        paths.chunk_name(chunk(1)).replace("-", "_"),
        paths.chunk_name(chunk(1))[2:],
        paths.chunk_name(chunk(1)) + "\n",
    ],
)
def test_a_foreign_name_is_none(name: str) -> None:
    assert paths.parse_chunk_name(name, Namespace()) is None


@pytest.mark.parametrize("name", ["", "x", LAYOUT.digest.hex()[1:], LAYOUT.digest.hex().upper() + "A", "lost+found"])
def test_a_foreign_folder_is_none(name: str) -> None:
    assert paths.parse_layout_name(name) is None
    assert paths.parse_namespace(name) is None


@pytest.mark.parametrize("writer", ["", ".", "..", "a/b", "-a", "a" * 101, "ä", "a\n"])
def test_a_writer_is_a_folders_name(writer: str) -> None:
    with pytest.raises(ValueError, match="writer"):
        paths.validate_writer(writer)
