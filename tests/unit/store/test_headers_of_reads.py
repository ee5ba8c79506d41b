"""Headers that go with a chunk to a reader that verifies it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry_keeper.store import chunk_file
from kvferry_keeper.store.chunk_file import HEADER_BYTES, Algorithm
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.store.volume import Volume
from support.tier_chunks import LAYOUT, SECRET, chunk, empty, payload, truth


@pytest.mark.parametrize("keyring", [None, SecretsKeyring({"*": SECRET})])
def test_a_chunk_is_delivered_as_it_lies_on_the_drive(tmp_path: Path, keyring: SecretsKeyring | None) -> None:
    volume = Volume(tmp_path, capacity_bytes=1 << 20, keyring=keyring)
    volume.open()
    try:
        first, second = chunk(1), chunk(2)
        for each in (first, second):
            assert volume.write(LAYOUT.digest, each, payload(each)) is Outcome.OK
        header, into = memoryview(bytearray(HEADER_BYTES)), empty()
        assert volume.read(LAYOUT.digest, first, into, header) is Outcome.OK
        parsed = chunk_file.parse_header(header)
        assert parsed is not None
        assert chunk_file.verify_identity(parsed, LAYOUT.digest, first, len(into)) is Outcome.OK
        if keyring is None:
            assert parsed.algorithm is Algorithm.PLAIN
            assert chunk_file.verify_plain(parsed, into) is Outcome.OK
        else:
            assert parsed.algorithm is Algorithm.SEALED
            assert into != truth(first)
            keys = keyring.keys(first.namespace, volume.volume_id)
            assert chunk_file.unseal(parsed, header, into, into, keys) is Outcome.OK
        assert into == truth(first)
        # It stays what it was when the next chunk is read.
        assert volume.read(LAYOUT.digest, second, empty()) is Outcome.OK
        assert chunk_file.parse_header(header) == parsed
        assert volume.read(LAYOUT.digest, chunk(3), empty(), header) is Outcome.MISSING
        # What is delivered was verified, also where it stays sealed.
        (file,) = (tmp_path / "pages").rglob(f"{second.key.hex()}-*.page")
        content = bytearray(file.read_bytes())
        content[5000] ^= 1
        file.write_bytes(content)
        assert volume.read(LAYOUT.digest, second, empty(), header) is Outcome.CORRUPT_PAYLOAD
    finally:
        volume.close()
