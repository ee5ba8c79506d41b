from __future__ import annotations

from kvferry_sim.block_pool import PageHash, PageId
from kvferry_sim.kv_transfer import PageMemory, layout_digest

LAYOUT = layout_digest("tiny", 32, 256)


def test_contents_follow_from_hash_and_layout() -> None:
    memory, other = (PageMemory(256, LAYOUT) for _ in range(2))
    other_layout = PageMemory(256, layout_digest("other", 32, 256))
    content = memory.expected(PageHash(7))
    assert len(content) == 256
    assert other.expected(PageHash(7)) == content
    assert memory.expected(PageHash(8)) != content
    assert other_layout.expected(PageHash(7)) != content


def test_contents_differ_all_over() -> None:
    """A page that is half another one must not pass for either."""
    memory = PageMemory(256, LAYOUT)
    one, two = memory.expected(PageHash(1)), memory.expected(PageHash(2))
    for start in range(8, 256, 32):
        assert one[start : start + 32] != two[start : start + 32]


def test_pages_hold_what_was_written() -> None:
    memory = PageMemory(64, LAYOUT)
    memory.write(PageId(1), b"\x01" * 64)
    assert memory.read(PageId(1)) == b"\x01" * 64
    assert memory.read(PageId(0)) == memory.read(PageId(2)) == bytes(64)


def test_layouts_differ_in_every_part() -> None:
    digests = {
        layout_digest("tiny", 32, 256),
        layout_digest("tiny", 16, 256),
        layout_digest("tiny", 32, 512),
        layout_digest("other", 32, 256),
    }
    assert len(digests) == 4
