"""A chunk file's bytes: a header of one sector, then the payload. Pure.

A chunk is *plain* (xxh3-128) or *sealed* (AES-256-GCM).
"""

from __future__ import annotations

import enum
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from kvferry.keeper.layout import ALIGNMENT, ChunkId, ChunkKey, LayoutDigest, validate_payload_bytes
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store.outcome import Outcome

HEADER_BYTES = ALIGNMENT
SEALING_KEY_BYTES = 32

_MAGIC = b"KVFERRY\n"
_VERSION = 1
# The header, little-endian. Its checksum binds all fields together, so a wrong name, another model, a torn write, a
# flipped bit or a mix of two chunks is detected. Any process that can write the folder can forge plain chunks.
#
#     offset  bytes
#          0      8  magic
#          8      2  version
#         10      1  algorithm: 1 plain, 2 sealed
#         11      1  length of the tenant
#         12      4  zero
#         16      8  payload bytes
#         24     36  chunk key
#         60      4  zero
#         64      8  route key
#         72     16  layout digest
#         88     64  tenant, padded with zeros
#        152      8  epoch
#        160      8  created, in nanoseconds since 1970
#        168      8  fingerprint of the sealing key, else zeros
#        176     12  nonce, else zeros
#        188   3876  zeros
#       4064     16  xxh3-128 of the payload, or the GCM tag (the header before it is associated data)
#       4080     16  xxh3-128 of all before
_FIELDS = struct.Struct("<8sHBB4xQ36s4xQ16s64sQQ8s12s")
_CHECK_AT = HEADER_BYTES - 32
_HEADER_CHECK_AT = HEADER_BYTES - 16
_ZEROS = bytes(HEADER_BYTES)
_NO_FINGERPRINT = bytes(8)
_NONCE_BYTES = 12
_TAG_BYTES = 16
# Enough for any payload, and one GCM call can process it.
MAX_PAYLOAD_BYTES = 1 << 30


class Algorithm(enum.IntEnum):
    PLAIN = 1
    SEALED = 2


class Keyring(Protocol):
    """With a keyring, only sealed chunks are accepted."""

    def keys(self, namespace: Namespace, volume_id: str) -> tuple[bytes, ...]:
        """Return keys of SEALING_KEY_BYTES, unique to the namespace on the volume; the first one seals. Empty: none.

        With random nonces, 2^32 chunks of one key repeat one with odds of 2^-33.
        """
        ...


@dataclass(frozen=True, slots=True)
class Header:
    algorithm: Algorithm
    chunk: ChunkId
    layout: LayoutDigest
    payload_bytes: int
    created_s: float
    fingerprint: bytes
    nonce: bytes
    check: bytes


def chunk_file_bytes(payload_bytes: int) -> int:
    return HEADER_BYTES + payload_bytes


def write_plain_header(
    header: memoryview, payload: memoryview, layout: LayoutDigest, chunk: ChunkId, created_s: float
) -> None:
    check = xxhash.xxh3_128_digest(payload)
    _write_fields(header, Algorithm.PLAIN, len(payload), layout, chunk, created_s)
    _write_checks(header, check)


def seal(
    header: memoryview,
    payload: memoryview,
    sealed: memoryview,
    layout: LayoutDigest,
    chunk: ChunkId,
    created_s: float,
    key: bytes,
) -> None:
    # Slow to import, and not needed by a keeper without keys.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    nonce = os.urandom(_NONCE_BYTES)
    _write_fields(header, Algorithm.SEALED, len(payload), layout, chunk, created_s, fingerprint(key), nonce)
    encryptor = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    encryptor.authenticate_additional_data(header[:_CHECK_AT])
    encryptor.update_into(payload, sealed)
    encryptor.finalize()
    _write_checks(header, encryptor.tag)


def parse_header(header: memoryview) -> Header | None:
    """Return None for a torn header or another version."""
    if bytes(header[_HEADER_CHECK_AT:]) != xxhash.xxh3_128_digest(header[:_HEADER_CHECK_AT]):
        return None
    (
        magic,
        version,
        algorithm,
        tenant_bytes,
        payload_bytes,
        key,
        route_key,
        layout,
        tenant,
        epoch,
        created_ns,
        fingerprint,
        nonce,
    ) = _FIELDS.unpack_from(header)
    if magic != _MAGIC or version != _VERSION:
        return None
    # A header with a valid checksum may still be forged, with invalid fields.
    try:
        namespace = Namespace(tenant[:tenant_bytes].decode("ascii"), epoch)
        validate_payload_bytes(payload_bytes)
        return Header(
            Algorithm(algorithm),
            ChunkId(ChunkKey(key), route_key, namespace),
            LayoutDigest(layout),
            payload_bytes,
            created_ns / 1e9,
            fingerprint,
            nonce,
            bytes(header[_CHECK_AT:_HEADER_CHECK_AT]),
        )
    except ValueError:
        return None


def is_sealed(raw_header: memoryview) -> bool:
    header = parse_header(raw_header)
    return header is not None and header.algorithm is Algorithm.SEALED


def verify_identity(header: Header, layout: LayoutDigest, chunk: ChunkId, payload_bytes: int) -> Outcome:
    """Return OK, WRONG_KEY, WRONG_LAYOUT or WRONG_NAMESPACE."""
    if header.chunk.key != chunk.key or header.chunk.route_key != chunk.route_key:
        return Outcome.WRONG_KEY
    if header.layout != layout or header.payload_bytes != payload_bytes:
        return Outcome.WRONG_LAYOUT
    if header.chunk.namespace != chunk.namespace:
        return Outcome.WRONG_NAMESPACE
    return Outcome.OK


def verify_plain(header: Header, payload: memoryview) -> Outcome:
    """Return OK, CORRUPT_PAYLOAD, or UNDECRYPTABLE for a sealed chunk."""
    if header.algorithm is not Algorithm.PLAIN:
        return Outcome.UNDECRYPTABLE
    return Outcome.OK if xxhash.xxh3_128_digest(payload) == header.check else Outcome.CORRUPT_PAYLOAD


def unseal(
    header: Header, raw_header: memoryview, sealed: memoryview, payload: memoryview, keys: Sequence[bytes]
) -> Outcome:
    """Decrypt `sealed` into `payload`, which may be the same memory and is undefined unless OK.

    CORRUPT_PAYLOAD: changed bytes. UNDECRYPTABLE: a plain chunk, or none of these keys.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = next((key for key in keys if fingerprint(key) == header.fingerprint), None)
    if header.algorithm is not Algorithm.SEALED or key is None:
        return Outcome.UNDECRYPTABLE
    decryptor = Cipher(algorithms.AES(key), modes.GCM(header.nonce, header.check)).decryptor()
    decryptor.authenticate_additional_data(raw_header[:_CHECK_AT])
    decryptor.update_into(sealed, payload)
    try:
        decryptor.finalize()
    except InvalidTag:
        return Outcome.CORRUPT_PAYLOAD
    return Outcome.OK


def _write_fields(
    header: memoryview,
    algorithm: Algorithm,
    payload_bytes: int,
    layout: LayoutDigest,
    chunk: ChunkId,
    created_s: float,
    key_fingerprint: bytes = _NO_FINGERPRINT,
    nonce: bytes = bytes(_NONCE_BYTES),
) -> None:
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES}")
    header[:] = _ZEROS
    tenant = chunk.namespace.tenant.encode("ascii")
    _FIELDS.pack_into(
        header,
        0,
        _MAGIC,
        _VERSION,
        algorithm,
        len(tenant),
        payload_bytes,
        chunk.key,
        chunk.route_key,
        layout,
        tenant,
        chunk.namespace.epoch,
        int(created_s * 1e9),
        key_fingerprint,
        nonce,
    )


def _write_checks(header: memoryview, check: bytes) -> None:
    header[_CHECK_AT:_HEADER_CHECK_AT] = check
    header[_HEADER_CHECK_AT:] = xxhash.xxh3_128_digest(header[:_HEADER_CHECK_AT])


def fingerprint(key: bytes) -> bytes:
    """Tells a wrong key from changed bytes."""
    if len(key) != SEALING_KEY_BYTES:
        raise ValueError(f"a sealing key of {len(key)} bytes instead of {SEALING_KEY_BYTES}")
    return hashlib.blake2b(key, digest_size=8, person=b"kvferry-page-key").digest()
