"""Why deployments of Ray Serve are not healthy, in one line each, of Serve's own messages."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvferry.errors import printable, shortened

# Beginnings of lines of `python -m kvferry.app deploy --wait`.
CAUSE_MARK = "not healthy yet: "
GIVEN_UP = "Ray Serve has given up: "
_MAX_CAUSE_BYTES = 700  # of one deployment; Serve's messages have tracebacks
_MAX_SHOWN = 4  # deployments
_GUESS = "This may be caused by a slow __init__ or reconfigure method."  # Serve adds it after 30 s
_ERROR_CLASS = re.compile(r"(?:kvferry\.errors\.|pydantic_core\.\S*?)?([A-Z]\w*): (?=\S)")


def cause_of(message: str) -> str:
    """Return the sentence that a message begins with, and the error that its traceback ends with."""
    lines = [line.strip() for line in message.replace(_GUESS, "").splitlines() if line.strip()]
    if not lines:
        return ""
    what = lines[0].removesuffix("Error:").partition(" This may be due")[0].strip()
    if len(lines) == 1:
        return shortened(printable(what), _MAX_CAUSE_BYTES)
    own = [line for line in lines[1:] if line.startswith("kvferry.errors.")]
    error = (own or lines)[-1]
    # The error first: it has the key, and a terminal's line may end early.
    return shortened(printable(f"{_ERROR_CLASS.sub('', error, count=1)} ({what})"), _MAX_CAUSE_BYTES)


def causes_of(messages: Mapping[str, str]) -> str:
    """Return the causes of deployments, by their names, in one line."""
    parts = [f"{name}: {cause}" for name, message in messages.items() if (cause := cause_of(message))]
    more = f"; and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
    return "; ".join(parts[:_MAX_SHOWN]) + more
