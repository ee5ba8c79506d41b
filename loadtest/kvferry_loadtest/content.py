"""Content of segments, as text and as token ids, and the tools that a request may offer.

Content is a function of the segment's key: the same in every run, process and version of Python. A shorter segment of
the same key is the beginning of a longer one, which is what the partial last block of a trace needs.

Every word of a text begins with a space and is one token together with it (see `words.py`). Byte-level BPE tokenizers
cut text before a space that a letter follows, so texts that follow one another never merge at the seam: n tokens of
segments are n tokens of prompt, and prompts that share segments share exactly their tokens. What a chat template puts
around a message comes on top; a template that strips messages takes the first space away, and the word may then be two
tokens, always the same.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry_loadtest.plan import Segment
from kvferry_loadtest.words import WORDS

# Ids that any vocabulary has and none uses for control: above bytes and special tokens, below 30,000.
FIRST_TOKEN_ID = 1000
NUM_TOKEN_IDS = 1 << 14

_SPACED_WORDS = np.array([f" {word}" for word in WORDS], dtype=object)
# 1,024 segments of 10,000 tokens are about 60 MB of text.
_CACHED_SEGMENTS = 1024


def text_of(segment: Segment) -> str:
    """`segment.num_tokens` words, a space before each: as many tokens of a byte-level BPE, give or take one."""
    return _text(segment.key, segment.num_tokens)


def token_ids_of(segment: Segment) -> list[int]:
    """`segment.num_tokens` ids from FIRST_TOKEN_ID to FIRST_TOKEN_ID + NUM_TOKEN_IDS - 1; the caller's own list."""
    return list(_token_ids(segment.key, segment.num_tokens))


@lru_cache(maxsize=_CACHED_SEGMENTS)
def _text(key: str, num_tokens: int) -> str:
    return "".join(_SPACED_WORDS[_numbers(key, num_tokens) % len(WORDS)])


@lru_cache(maxsize=_CACHED_SEGMENTS)
def _token_ids(key: str, num_tokens: int) -> tuple[int, ...]:
    return tuple((_numbers(key, num_tokens).astype(np.int64) % NUM_TOKEN_IDS + FIRST_TOKEN_ID).tolist())


def _numbers(key: str, count: int) -> npt.NDArray[np.uint16]:
    """Uniform 16-bit numbers. SHAKE is defined to the last bit and as long as asked; a library may change."""
    return np.frombuffer(hashlib.shake_128(key.encode()).digest(2 * count), dtype="<u2")


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


# As OpenAI's `tools` has them. Fixed: templates put them first in a prompt, where a change would undo all sharing.
TOOLS: tuple[dict[str, Any], ...] = (
    _tool(
        "search_documents",
        "Find passages that answer a question.",
        query="What to look for, in a few words.",
        collection="The name of the collection to look in.",
    ),
    _tool("read_file", "Read one text file of the workspace.", path="The file's path, relative to the workspace."),
    _tool("run_command", "Run a command in the workspace and read what it prints.", command="One line of shell."),
)
