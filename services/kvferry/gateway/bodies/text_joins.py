"""Joins of decoded texts that let other threads run in between."""

# Eight million characters of which one is an emoji are 32 MB in Python: "".join holds the interpreter 13 ms for them,
# most of which the system takes for fresh pages. Copied in pieces, no call takes a millisecond. Python itself can only
# append in place, and not if a later piece has wider characters.

from __future__ import annotations

import ctypes
from collections.abc import Sequence

JOIN_AT_ONCE_CHARS = 256 << 10

_address, _size, _char = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_uint32
_new_text = ctypes.PYFUNCTYPE(_address, _size, _char)(("PyUnicode_New", ctypes.pythonapi))
_copy = ctypes.PYFUNCTYPE(_size, _address, _size, ctypes.py_object, _size, _size)(
    ("PyUnicode_CopyCharacters", ctypes.pythonapi)
)
_release = ctypes.PYFUNCTYPE(None, _address)(("Py_DecRef", ctypes.pythonapi))

_LARGEST_CHARACTERS = (0x7F, 0xFF, 0xFFFF, 0x10FFFF)  # of Python's four kinds of texts


def join_in_steps(pieces: Sequence[str], *, at_once_chars: int = JOIN_AT_ONCE_CHARS) -> str:
    num_chars = sum(map(len, pieces))
    if num_chars <= at_once_chars:
        return "".join(pieces)
    kinds = _LARGEST_CHARACTERS[:1] if all(map(str.isascii, pieces)) else _LARGEST_CHARACTERS[1:]
    for largest in kinds[:-1]:
        try:
            return _joined(pieces, num_chars, largest)
        except SystemError:
            continue  # a piece has wider characters
    return _joined(pieces, num_chars, kinds[-1])


def _joined(pieces: Sequence[str], num_chars: int, largest: int) -> str:
    """Raises SystemError for a character over `largest`, the narrowest kind's that has all others."""
    address = _new_text(num_chars, largest)
    try:
        position = 0
        for piece in pieces:
            position += _copy(address, position, piece, 0, len(piece))
        text: str = ctypes.cast(address, ctypes.py_object).value
        return text
    finally:
        _release(address)
