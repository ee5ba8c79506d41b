"""Decoding of JSON with long texts, in short steps."""

from __future__ import annotations

import ctypes
import itertools
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.gateway.bodies.large_bodies import slices

# Eight million characters of which one is an emoji are 32 MB in Python: "".join holds the interpreter 13 ms for them,
# most of which the system takes for fresh pages. Copied in pieces, no call takes a millisecond. Python itself can only
# append in place, and not if a later piece has wider characters.

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


# A JSON decoder keeps the interpreter until its end: for 8 MiB up to 20 ms. Here, the middles of long texts are cut out
# of the JSON, which is decoded with marks in their places, and decoded in pieces. A piece that cannot be decoded stays
# in the JSON, so that the decoder meets the same first fault as in the whole; only its place is then corrected.

LONG_BYTES = 512 << 10  # shorter JSON is decoded at once
# Two to three of each long text stay in the JSON, and with them all texts of less than 4 KiB: 8 MiB of these take 8 ms.
# Slices of 1 KiB would double the time of bodies with texts of 3 KiB.
SLICE_BYTES = 2 << 10
SLICES_AT_ONCE = 32

_decode_text = msgspec.json.Decoder(str).decode

_CHARACTER = re.compile(rb"\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL)
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
# A slice may begin within the four digits of an escape.
_UNSURE_CHARACTERS = 5
_MAX_CHARACTERS = 64

_NUMBER_DIGITS = 6
_PLACE = re.compile(r"(?P<fault>JSON is malformed: .*)\(byte (?P<byte>\d+)\)")


@dataclass(slots=True)
class _Cut:
    start: int  # in the JSON
    marked_at: int  # in the JSON with marks
    end: int = 0
    pieces: list[str] = field(default_factory=list)


class _Unmappable(Exception):
    """JSON must be decoded at once."""


def decode_in_steps(raw: bytes, decode: Callable[[bytes], Any], *, slice_bytes: int = SLICE_BYTES) -> Any:
    """Return or raise what `decode` does."""
    marked = _MarkedJson(raw)
    for positions in _positions(raw, slice_bytes):
        if not marked.cut_out(positions):
            break
    if not marked.cuts:
        return decode(raw)
    try:
        return marked.decoded(decode)
    except _Unmappable:
        return decode(raw)


class _MarkedJson:
    """JSON with marks in place of parts of texts."""

    def __init__(self, raw: bytes) -> None:
        self.cuts: list[_Cut] = []
        self._raw = raw
        # Not a hexadecimal digit first, which would complete a broken escape before it.
        self._mark = f"~{secrets.token_hex(16)}"
        self._mark_bytes = len(self._mark) + _NUMBER_DIGITS
        self._kept: list[bytes] = []
        self._num_kept = 0
        self._end = 0  # of the last cut, in raw
        self._has_faulty_utf8 = False

    def cut_out(self, positions: list[int]) -> bool:
        """Return False for a fault after which nothing is decoded."""
        cut: _Cut | None = None
        for start, end in itertools.pairwise(positions):
            try:
                piece = _decode_text(b'"%b"' % self._raw[start:end])
            except msgspec.DecodeError:
                return False  # of one text, the decoder finds such a fault before bytes that are no UTF-8
            except UnicodeDecodeError:
                if not self._has_faulty_utf8:
                    self._has_faulty_utf8 = True
                    cut = None
                    continue
                piece = ""  # the decoder ends at the first one
            if cut is None:
                cut = self._begin(start)
            cut.pieces.append(piece)
            cut.end = self._end = end
        return True

    def _begin(self, start: int) -> _Cut:
        self._num_kept += start - self._end
        self._kept += [self._raw[self._end : start], f"{self._mark}{len(self.cuts):0{_NUMBER_DIGITS}}".encode()]
        cut = _Cut(start, self._num_kept)
        self._num_kept += self._mark_bytes
        self.cuts.append(cut)
        return cut

    def decoded(self, decode: Callable[[bytes], Any]) -> Any:
        try:
            values = [decode(b"".join([*self._kept, self._raw[self._end :]]))]
        except UnicodeDecodeError as error:
            raise self._in_whole_text(error) from None
        except msgspec.DecodeError as error:
            in_whole = self._in_whole_json(error)
            if in_whole is not None:
                raise in_whole from None
        else:
            self._fill(values)
            return values[0]
        return self.decoded(decode)

    def _in_whole_json(self, error: msgspec.DecodeError) -> msgspec.DecodeError | None:
        """Return None for a fault found in a mark, which then is no longer there."""
        found = _PLACE.fullmatch(str(error))
        if found is None:
            return error
        place = int(found["byte"])
        num_left_out = 0
        for number, cut in enumerate(self.cuts):
            if cut.marked_at >= place:
                break
            if place < cut.marked_at + self._mark_bytes:
                # A broken escape before the mark goes on in what was cut out.
                del self.cuts[number:], self._kept[2 * number :]
                self._end = self.cuts[-1].end if self.cuts else 0
                return None
            num_left_out += cut.end - cut.start - self._mark_bytes
        return type(error)(f"{found['fault']}(byte {place + num_left_out})")

    def _in_whole_text(self, error: UnicodeDecodeError) -> UnicodeDecodeError:
        start = error.start  # in the text, after escapes are decoded
        for number in re.findall(rb"%b(\d{%d})" % (self._mark.encode(), _NUMBER_DIGITS), error.object[: error.start]):
            start += sum(len(piece.encode()) for piece in self.cuts[int(number)].pieces) - self._mark_bytes
        end = start + error.end - error.start
        # The message has the byte at its start.
        return UnicodeDecodeError(error.encoding, bytes(start) + error.object[error.start :], start, end, error.reason)

    def _fill(self, values: list[Any]) -> None:
        # A value that a later one of the same key replaced is gone, with its marks.
        left: list[tuple[Any, Any]] = [(values, 0)]
        while left:
            parent, key = left.pop()
            value = parent[key]
            if type(value) is dict:
                if any(self._mark in name for name in value):
                    value = parent[key] = self._with_whole_keys(value)
                left.extend((value, name) for name in value)
            elif type(value) is list:
                left.extend((value, index) for index in range(len(value)))
            elif type(value) is str and self._mark in value:
                parent[key] = self._whole(value)

    def _with_whole_keys(self, values: dict[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        for name, value in values.items():
            key = self._whole(name) if self._mark in name else name
            # Elsewhere, with fewer escapes, the same key was too short for a cut: its last value may be either.
            if key in whole and (key is name or key in values):
                raise _Unmappable
            whole[key] = value
        return whole

    def _whole(self, text: str) -> str:
        before, *rest = text.split(self._mark)
        pieces = [before]
        for part in rest:
            pieces += self.cuts[int(part[:_NUMBER_DIGITS])].pieces
            pieces.append(part[_NUMBER_DIGITS:])
        return join_in_steps(pieces)


def _positions(raw: bytes, slice_bytes: int) -> Iterator[list[int]]:
    """Yield two or more positions in each long text where it may be cut."""
    for run in _runs_in_texts(raw, slice_bytes):
        some = [*run[:-1:SLICES_AT_ONCE], run[-1]]
        positions = [position for start, end in some if (position := _between_characters(raw, start, end))]
        if len(positions) > 1:
            yield positions


def _runs_in_texts(raw: bytes, slice_bytes: int) -> Iterator[list[tuple[int, int]]]:
    run: list[tuple[int, int]] = []
    for start, end, masked, begins_in_text in slices(raw, slice_bytes):
        if begins_in_text and b'"' not in masked:
            run.append((start, end))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _between_characters(raw: bytes, start: int, end: int) -> int:
    """Return a position in a text, outside escapes and pairs of surrogates; 0 if none is near."""
    position, is_high = start, False
    for number in range(_MAX_CHARACTERS):
        if number > _UNSURE_CHARACTERS and not is_high and position < end and not 0x80 <= raw[position] < 0xC0:
            return position
        character = _CHARACTER.match(raw, position, end)
        if character is None:
            break
        is_high = _HIGH_SURROGATE.match(character[0]) is not None
        position = character.end()
    return 0
