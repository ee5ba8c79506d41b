"""Patterns of JSON schemas, which are ECMAScript's, as regexes of llguidance's Lark."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import InvalidRequest

_ASCII = {"d": "0-9", "w": "A-Za-z0-9_"}  # in Rust's regexes they are of all of Unicode
ANYTHING = r"(.|\n)*"


def _pieces(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield each character, or backslash and character, and whether it is in a class."""
    in_class, i = False, 0
    while i < len(pattern):
        piece = pattern[i : i + 2] if pattern[i] == "\\" else pattern[i]
        i += len(piece)
        if piece == "[" and not in_class:
            yield piece, False
            in_class = True
            continue
        in_class = in_class and piece != "]"
        yield piece, in_class


def lark_pattern(pattern: str) -> str:
    """Return what stands between slashes in Lark."""
    written = []
    for piece, in_class in _pieces(pattern):
        if len(piece) == 2 and piece[1] in _ASCII:
            written.append(_ASCII[piece[1]] if in_class else f"[{_ASCII[piece[1]]}]")
        elif len(piece) == 2 and piece[1].lower() in _ASCII and not in_class:
            written.append(f"[^{_ASCII[piece[1].lower()]}]")
        else:
            written.append({"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(piece, piece))
    return "".join(written)


def whole_pattern(pattern: str) -> str:
    """Return a pattern of the whole text where the other one may be found anywhere in it. Raises InvalidRequest."""
    pieces = [piece for piece, _ in _pieces(pattern)]
    begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = "".join(pieces[begins : len(pieces) - ends])
    if (begins or ends) and _has_alternatives(inner):
        raise InvalidRequest("a pattern with | beside ^ or $ cannot be enforced in this model's format")
    return f"{'' if begins else ANYTHING}({lark_pattern(inner)}){'' if ends else ANYTHING}"


def escaped(text: str) -> str:
    """Return a pattern of a text."""
    return "".join(
        r"\n" if char == "\n" else char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}" for char in text
    )


def _has_alternatives(pattern: str) -> bool:
    depth = 0
    for piece, in_class in _pieces(pattern):
        if not in_class:
            depth += {"(": 1, ")": -1}.get(piece, 0)
            if piece == "|" and depth == 0:
                return True
    return False
