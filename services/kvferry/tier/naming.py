"""What the paths of a volume say.

    volume.json                                     its id
    volume.lock                                     held by every keeper that serves it
    layouts/<layout digest>.json                    what the pages of a layout are
    pages/<writer>/<layout digest>/<tenant>.<epoch>/<2 hex>/<page key>-<route key>.page
    quarantine/<writer>/<layout digest>/<tenant>.<epoch>/<page key>-<route key>.page.<outcome>.<nanoseconds>
    tmp/<writer>/                                   pages being written

Digests and keys are hexadecimal, lower case. Two hex digits of the key keep a folder below a few thousand files. Every
writer has folders of its own, so that a volume that many nodes mount needs no agreement about who evicts what.
"""

from __future__ import annotations

import re
import time

from kvferry.tier.layout import LAYOUT_DIGEST_BYTES, PAGE_KEY_BYTES, LayoutDigest, Namespace, PageId, PageKey

DESCRIPTION = "volume.json"
LOCK = "volume.lock"
LAYOUTS = "layouts"
PAGES = "pages"
QUARANTINE = "quarantine"
TEMPORARY = "tmp"

_SUFFIX = ".page"
_PAGE_NAME = re.compile(rf"([0-9a-f]{{{2 * PAGE_KEY_BYTES}}})-([0-9a-f]{{16}})\.page")
_LAYOUT_NAME = re.compile(rf"[0-9a-f]{{{2 * LAYOUT_DIGEST_BYTES}}}")
_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_writer(writer: str) -> str:
    """Raises ValueError for what could not be a folder's name."""
    if not _WRITER.fullmatch(writer):
        raise ValueError(f"writer {writer!r}: letters, digits, dots, dashes and underscores, at most 100")
    return writer


def page_folder(writer: str, layout: LayoutDigest, page: PageId) -> str:
    """Relative to the volume."""
    return f"{PAGES}/{writer}/{layout.hex()}/{page.namespace}/{fan_out(page.key)}"


def page_path(writer: str, layout: LayoutDigest, page: PageId) -> str:
    """Relative to the volume."""
    return f"{page_folder(writer, layout, page)}/{page_name(page)}"


def quarantine_path(writer: str, layout: LayoutDigest, page: PageId, cause: str) -> str:
    """Relative to the volume. Another one every time: a page that is bad again must not replace what is in hand."""
    return f"{QUARANTINE}/{writer}/{layout.hex()}/{page.namespace}/{page_name(page)}.{cause}.{time.monotonic_ns()}"


def fan_out(key: PageKey) -> str:
    return f"{key[0]:02x}"


def page_name(page: PageId) -> str:
    return f"{page.key.hex()}-{page.route_key:016x}{_SUFFIX}"


def parse_page_name(name: str, namespace: Namespace) -> PageId | None:
    """What `page_name` made, or None for a foreign file."""
    found = _PAGE_NAME.fullmatch(name)
    if found is None:
        return None
    return PageId(PageKey(bytes.fromhex(found[1])), int(found[2], 16), namespace)


def parse_quarantine_name(name: str, namespace: Namespace) -> PageId | None:
    """The page that `quarantine_path` was given, or None for a foreign file."""
    start, suffix, _ = name.partition(f"{_SUFFIX}.")
    return parse_page_name(start + _SUFFIX, namespace) if suffix else None


def parse_layout_name(name: str) -> LayoutDigest | None:
    return LayoutDigest(bytes.fromhex(name)) if _LAYOUT_NAME.fullmatch(name) else None


def parse_namespace(name: str) -> Namespace | None:
    try:
        return Namespace.parse(name)
    except ValueError:
        return None
