"""The bytes of a chunk file: whatever is changed is seen."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.keeper.layout import ChunkId
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import chunk_file
from kvferry_keeper.store.chunk_file import HEADER_BYTES, Algorithm, chunk_file_bytes
from kvferry_keeper.store.direct_io import aligned_buffer
from kvferry_keeper.store.outcome import Outcome
from support.tier_chunks import LARGER, LAYOUT, SECRET, chunk, empty, payload, truth

CHUNK = chunk(7, Namespace("acme", 3))
FILE_BYTES = chunk_file_bytes(LAYOUT.payload_bytes)


def written(of: ChunkId = CHUNK, key: bytes | None = None) -> memoryview:
    """A whole file."""
    file = aligned_buffer(FILE_BYTES)
    if key is None:
        file[HEADER_BYTES:] = truth(of)
        chunk_file.write_plain_header(file[:HEADER_BYTES], file[HEADER_BYTES:], LAYOUT.digest, of, 12.5)
    else:
        chunk_file.seal(file[:HEADER_BYTES], payload(of), file[HEADER_BYTES:], LAYOUT.digest, of, 12.5, key)
    return file


def read(file: memoryview, key: bytes | None = None, of: ChunkId = CHUNK) -> tuple[Outcome, bytes]:
    header = chunk_file.parse_header(file[:HEADER_BYTES])
    if header is None:
        return Outcome.CORRUPT_HEADER, b""
    outcome = chunk_file.verify_identity(header, LAYOUT.digest, of, LAYOUT.payload_bytes)
    if outcome is not Outcome.OK:
        return outcome, b""
    if key is None:
        return chunk_file.verify_plain(header, file[HEADER_BYTES:]), bytes(file[HEADER_BYTES:])
    into = empty()
    return chunk_file.unseal(header, file[:HEADER_BYTES], file[HEADER_BYTES:], into, [key]), bytes(into)


@pytest.mark.parametrize("key", [None, SECRET], ids=["plain", "sealed"])
def test_a_chunk_comes_back(key: bytes | None) -> None:
    assert read(written(key=key), key) == (Outcome.OK, truth(CHUNK))


def test_a_header_says_all_that_names_a_chunk() -> None:
    header = chunk_file.parse_header(written()[:HEADER_BYTES])
    assert header is not None
    assert (header.chunk, header.layout, header.payload_bytes) == (CHUNK, LAYOUT.digest, LAYOUT.payload_bytes)
    assert (header.algorithm, header.created_s) == (Algorithm.PLAIN, 12.5)


@pytest.mark.parametrize("key", [None, SECRET], ids=["plain", "sealed"])
@given(bits=st.sets(st.integers(0, 8 * FILE_BYTES - 1), min_size=1, max_size=8))
def test_flipped_bits_are_seen_wherever_they_are(key: bytes | None, bits: set[int]) -> None:
    file = written(key=key)
    for bit in bits:
        file[bit // 8] ^= 1 << bit % 8
    outcome, _ = read(file, key)
    in_header = any(bit < 8 * HEADER_BYTES for bit in bits)
    assert outcome is (Outcome.CORRUPT_HEADER if in_header else Outcome.CORRUPT_PAYLOAD)


@pytest.mark.parametrize("key", [None, SECRET], ids=["plain", "sealed"])
@given(cut=st.integers(1, FILE_BYTES - 1), seed=st.integers(0, 1000))
def test_two_chunks_in_one_file_are_seen(key: bytes | None, cut: int, seed: int) -> None:
    file, other = written(key=key), written(chunk(seed + 1000), key)
    torn = bytes(file[:cut]) + bytes(other[cut:])
    # Sealed chunks are random: the last byte of two is the same in one case of 256, and the file is whole then.
    assume(torn != bytes(file))
    file[:] = torn
    outcome, _ = read(file, key)
    # Up to the header's checks, what the headers differ in may not have been reached yet.
    assert outcome is not Outcome.OK


@pytest.mark.parametrize("key", [None, SECRET], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    ("asked", "outcome"),
    [
        (chunk(8, CHUNK.namespace), Outcome.WRONG_KEY),
        (dataclasses.replace(CHUNK, route_key=8), Outcome.WRONG_KEY),
        (dataclasses.replace(CHUNK, namespace=Namespace("acme", 4)), Outcome.WRONG_NAMESPACE),
        (dataclasses.replace(CHUNK, namespace=Namespace("acm", 3)), Outcome.WRONG_NAMESPACE),
    ],
)
def test_a_whole_chunk_of_another_name_is_seen(key: bytes | None, asked: ChunkId, outcome: Outcome) -> None:
    assert read(written(key=key), key, asked)[0] is outcome


def test_a_chunk_of_another_layout_is_seen() -> None:
    header = chunk_file.parse_header(written()[:HEADER_BYTES])
    assert header is not None
    assert chunk_file.verify_identity(header, LARGER.digest, CHUNK, LAYOUT.payload_bytes) is Outcome.WRONG_LAYOUT
    assert chunk_file.verify_identity(header, LAYOUT.digest, CHUNK, LARGER.payload_bytes) is Outcome.WRONG_LAYOUT


def test_where_chunks_are_sealed_a_plain_one_is_refused_and_the_other_way_round() -> None:
    # Whoever may write the folder could put any chunk there that only had to have the right checksum.
    assert read(written(), SECRET)[0] is Outcome.UNDECRYPTABLE
    assert read(written(key=SECRET))[0] is Outcome.UNDECRYPTABLE


def test_another_key_is_told_from_changed_bytes() -> None:
    assert read(written(key=SECRET), SECRET[::-1])[0] is Outcome.UNDECRYPTABLE


def test_a_sealed_header_cannot_be_forged() -> None:
    file = written(key=SECRET)
    forged = aligned_buffer(HEADER_BYTES)
    chunk_file.write_plain_header(forged, file[HEADER_BYTES:], LAYOUT.digest, chunk(9, CHUNK.namespace), 12.5)
    # Everything about the cipher from the real chunk, everything else about the other, and right checksums.
    forged[10:11] = file[10:11]
    forged[168:188] = file[168:188]
    chunk_file._write_checks(forged, bytes(file[HEADER_BYTES - 32 : HEADER_BYTES - 16]))
    file[:HEADER_BYTES] = forged
    assert read(file, SECRET, chunk(9, CHUNK.namespace))[0] is Outcome.CORRUPT_PAYLOAD


def test_a_header_with_right_checksums_that_says_nonsense_is_none() -> None:
    for at, value in ((0, 0), (8, 9), (10, 7), (11, 0), (16, 1), (88, ord("!"))):
        file = written()
        file[at] = value
        header = file[:HEADER_BYTES]
        chunk_file._write_checks(header, bytes(header[HEADER_BYTES - 32 : HEADER_BYTES - 16]))
        assert chunk_file.parse_header(header) is None, at


def test_random_bytes_are_no_header() -> None:
    seeded = random.Random(1)
    for _ in range(100):
        assert chunk_file.parse_header(memoryview(seeded.randbytes(HEADER_BYTES))) is None
    assert chunk_file.parse_header(memoryview(bytes(HEADER_BYTES))) is None


def test_a_sealed_chunk_shows_nothing_of_its_payload_and_never_the_same_nonce() -> None:
    files = [bytes(written(key=SECRET)) for _ in range(50)]
    assert len({file[176:188] for file in files}) == len(files)
    pieces = [truth(CHUNK)[at : at + 16] for at in range(0, LAYOUT.payload_bytes, 16)]
    assert not any(piece in file for piece in pieces for file in files[:2])


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        written(key=b"short")
