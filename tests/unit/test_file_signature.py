"""A file that was written, replaced or made readable has another signature."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.util.files import file_signature


def test_a_file_that_was_written_or_replaced_differs(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    assert file_signature(file) is None
    file.write_text("one")
    before = file_signature(file)
    assert before is not None
    assert before.size_bytes == 3
    assert file_signature(file) == before
    modified_ns = file.stat().st_mtime_ns
    other.write_text("two")
    os.utime(other, ns=(modified_ns, modified_ns))
    other.replace(file)
    assert file_signature(file) != before


def test_a_file_that_was_made_readable_differs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    file.chmod(0o000)
    before = file_signature(file)
    file.chmod(0o600)
    assert file_signature(file) != before
