"""Values of `engine.args` that are refused when the configuration is read, because vLLM finds them late or never."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_MAX_WHOLE = 2**63 - 1
_MAX_DEPTH = 16  # of lists and mappings in each other
_MAX_DIGITS = 32
_POWER_OF_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WITH_SUFFIX = re.compile(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", re.ASCII)  # fractions of powers of 10 alone
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


class Expected(Protocol):
    def takes(self, value: object) -> bool: ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Whole:
    low: int
    high: int
    has_suffixes: bool = False  # of vLLM's `human_readable_int`

    def takes(self, value: object) -> bool:
        number = whole(value, has_suffixes=self.has_suffixes)
        return number is not None and self.low <= number <= self.high

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}" + (", or as in 4G or 4.5g" if self.has_suffixes else "")


@dataclass(frozen=True, slots=True)
class ListOf:
    each: Expected
    max_length: int

    def takes(self, value: object) -> bool:
        return isinstance(value, list) and 1 <= len(value) <= self.max_length and all(map(self.each.takes, value))

    def __str__(self) -> str:
        return f"a list of 1 to {self.max_length}, each {self.each}"


_TIMEOUT = Whole(1, 31_536_000)  # seconds; torch turns them into milliseconds and adds them to the time
_BYTES = Whole(1, 2**50, has_suffixes=True)
_TOKENS = Whole(1, 2**31 - 1, has_suffixes=True)

# vLLM takes other numbers for these too, and then hangs, dies or exhausts memory.
EXPECTED: Mapping[str, Expected] = {
    "kv_cache_memory_bytes": _BYTES,
    "num_gpu_blocks_override": Whole(2, 2**31 - 1),  # one holds nothing; ids of blocks are numbers of 32 bits
    "max_num_scheduled_tokens": _TOKENS,
    "long_prefill_token_threshold": Whole(0, 2**31 - 1),
    "safetensors_prefetch_num_threads": Whole(1, 256),
    "safetensors_prefetch_block_size": Whole(4096, 2**30, has_suffixes=True),  # each thread reads as many bytes at once
    "distributed_timeout_seconds": _TIMEOUT,
    "cpu_distributed_timeout_seconds": _TIMEOUT,
    "numa_bind_nodes": ListOf(Whole(0, 1023), 64),  # missing ones are found at the start (`why_not_startable`)
    "seed": Whole(0, 2**32 - 1),  # NumPy takes no other
}


def why_not_expected(name: str, value: object) -> str:
    """Return what is expected of a value, or an empty string for a good one."""
    if value in ("", []):
        return "it is empty; leave it out to have vLLM's default"  # vLLM would turn a flag on
    if (reason := _why_no_argument(value, _MAX_DEPTH)) or (expected := EXPECTED.get(name)) is None:
        return reason
    return "" if expected.takes(value) else f"expected {expected}, not {_shown(value)}"


def _why_no_argument(value: object, depth: int) -> str:
    if isinstance(value, Mapping | list):
        if not depth:
            return f"lists and mappings in each other, more than {_MAX_DEPTH} deep"
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        return next(filter(None, (_why_no_argument(part, depth - 1) for part in parts)), "")
    if isinstance(value, str) and "\0" in value:
        return "a text with NUL"
    if isinstance(value, int) and abs(value) > _MAX_WHOLE:
        return f"a whole number beyond {_MAX_WHOLE}"
    return ""


def whole(value: object, *, has_suffixes: bool = True) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or len(value) > _MAX_DIGITS:
        return None
    if _WHOLE.fullmatch(value):
        return int(value)
    if has_suffixes and (found := _WITH_SUFFIX.fullmatch(value)):
        number, suffix = filter(None, found.groups())
        return int(float(number) * _POWER_OF_SUFFIX[suffix])
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def why_in_conflict(args: Mapping[str, Any], settings: Mapping[str, Any], keys: Mapping[str, str]) -> str:
    """Return the reason with its keys, or an empty string. `keys` has those of arguments and settings, by name."""
    ranks, most = settings["tensor_parallel_size"], settings["max_num_batched_tokens"]
    if most is not None:
        key = f"{keys['max_num_batched_tokens']} ({most})"
        scheduled = whole(args.get("max_num_scheduled_tokens"))
        if scheduled is not None and scheduled > most:
            return f"{keys['max_num_scheduled_tokens']}: expected at most {key}, not {scheduled}"
        if (num_seqs := settings["max_num_seqs"]) > most:
            return f"{keys['max_num_seqs']}: expected at most {key}, not {num_seqs}"
    nodes = args.get("numa_bind_nodes")
    if nodes is not None and len(nodes) < ranks:
        return f"{keys['numa_bind_nodes']}: expected a node for each of {ranks} ranks, not {len(nodes)}"
    context, threshold = settings["max_model_len"], whole(args.get("long_prefill_token_threshold"))
    if context is not None and threshold is not None and threshold > context:
        key, most_key = keys["long_prefill_token_threshold"], keys["max_model_len"]
        return f"{key}: expected at most {most_key} ({context}), not {threshold}"
    return ""
