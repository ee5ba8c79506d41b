"""Traces in the format that Mooncake publishes: one JSON object per line.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per block of the prompt]}

A block has 512 tokens; the last one of a prompt may be partial. Blocks of equal id have equal content.
Source: the traces of Mooncake's FAST '25 paper, github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kvferry_loadtest.errors import TraceError

BLOCK_TOKENS = 512


class TraceRequest(msgspec.Struct, frozen=True):
    """One line. ceil(input_length / 512) hash ids."""

    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of an unbounded cache of whole blocks, as shares from 0 to 1."""

    of_blocks: float  # of all whole blocks
    of_tokens: float  # of all prompt tokens, partial blocks among them


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceRequest]:
    """The first `max_requests`, as they stand in the file. Raises TraceError: one line with file, line and field."""
    try:
        with path.open("rb") as file:
            return [_request(path, number, line) for number, line in enumerate(islice(file, max_requests), 1)]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def hit_rates(requests: Iterable[TraceRequest], block_tokens: int = BLOCK_TOKENS) -> HitRates:
    """Replays hash ids in order. Only the blocks that a prompt begins with count, up to the first that is new; partial
    blocks never do. `block_tokens` is the size of a block in tokens of `input_length`.
    """
    seen: set[bytes] = set()  # digests of prompts' beginnings, a block each
    hit_blocks = whole_blocks = all_tokens = 0
    for request in requests:
        num_whole = request.input_length // block_tokens
        whole_blocks += num_whole
        all_tokens += request.input_length
        beginning = hashlib.blake2b(digest_size=16)
        hitting = True
        for hash_id in request.hash_ids[:num_whole]:
            beginning.update(hash_id.to_bytes(8, "little"))
            digest = beginning.digest()
            hitting = hitting and digest in seen
            hit_blocks += hitting
            seen.add(digest)
    return HitRates(
        of_blocks=hit_blocks / whole_blocks if whole_blocks else 0.0,
        of_tokens=hit_blocks * block_tokens / all_tokens if all_tokens else 0.0,
    )


def _request(path: Path, number: int, line: bytes) -> TraceRequest:
    where = f"{path}: line {number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: must be an object with timestamp, input_length, output_length and hash_ids")
    timestamp = _number(where, fields, "timestamp", least=0)
    input_length = _whole(where, fields, "input_length", least=1)
    output_length = _whole(where, fields, "output_length", least=0)
    hash_ids = _field(where, fields, "hash_ids")
    if not isinstance(hash_ids, list) or not all(_is_whole(each) and 0 <= each < 1 << 64 for each in hash_ids):
        raise TraceError(f"{where}: hash_ids: must be an array of whole numbers from 0 to 2^64 - 1")
    num_blocks = -(-input_length // BLOCK_TOKENS)
    if len(hash_ids) != num_blocks:
        raise TraceError(
            f"{where}: hash_ids: {len(hash_ids)} blocks, but input_length {input_length} makes {num_blocks}"
            f" of {BLOCK_TOKENS} tokens"
        )
    return TraceRequest(timestamp, input_length, output_length, tuple(hash_ids))


def _field(where: str, fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise TraceError(f"{where}: {name}: missing")
    return fields[name]


def _whole(where: str, fields: dict[str, Any], name: str, *, least: int) -> int:
    value = _field(where, fields, name)
    if not _is_whole(value) or value < least:
        raise TraceError(f"{where}: {name}: must be a whole number of at least {least}, not {json.dumps(value)}")
    return int(value)


def _number(where: str, fields: dict[str, Any], name: str, *, least: int) -> float:
    value = _field(where, fields, name)
    if (not _is_whole(value) and not (isinstance(value, float) and math.isfinite(value))) or value < least:
        raise TraceError(f"{where}: {name}: must be a number of at least {least}, not {json.dumps(value)}")
    return float(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
