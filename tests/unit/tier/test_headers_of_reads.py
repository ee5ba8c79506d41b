"""What goes with a page to whoever verifies it again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tier_pages import LAYOUT, SECRET, empty, page, payload, truth

from kvferry.tier import page_file
from kvferry.tier.keyring import SecretsKeyring
from kvferry.tier.outcome import Outcome
from kvferry.tier.page_file import HEADER_BYTES, Algorithm
from kvferry.tier.volume import Volume


@pytest.mark.parametrize("keyring", [None, SecretsKeyring({"*": SECRET})])
def test_the_header_fits_what_was_delivered(tmp_path: Path, keyring: SecretsKeyring | None) -> None:
    volume = Volume(tmp_path, capacity_bytes=1 << 20, keyring=keyring)
    volume.open()
    try:
        first, second = page(1), page(2)
        for each in (first, second):
            assert volume.write(LAYOUT.digest, each, payload(each)) is Outcome.OK
        header, into = memoryview(bytearray(HEADER_BYTES)), empty()
        assert volume.read(LAYOUT.digest, first, into, header) is Outcome.OK
        assert into == truth(first)
        parsed = page_file.parse_header(header)
        assert parsed is not None
        assert parsed.algorithm is Algorithm.PLAIN
        assert page_file.check_identity(parsed, LAYOUT.digest, first, len(into)) is Outcome.OK
        assert page_file.check_plain(parsed, into) is Outcome.OK
        # It stays what it was when the next page is read.
        assert volume.read(LAYOUT.digest, second, empty()) is Outcome.OK
        assert page_file.parse_header(header) == parsed
        assert volume.read(LAYOUT.digest, page(3), empty(), header) is Outcome.MISSING
    finally:
        volume.close()
