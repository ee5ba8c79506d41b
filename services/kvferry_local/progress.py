"""Progress of a starting cluster, for the user."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape

_PLAIN_INTERVAL_S = 15.0


class Progress(Protocol):
    """Receiver of progress. Its methods never block."""

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Context of a long step, marked failed by an exception."""
        yield

    def detail(self, text: str) -> None: ...

    def tick(self) -> None: ...

    def say(self, text: str) -> None: ...


class ConsoleProgress:
    """A live line on terminals; elsewhere a line per detail and every 15 s."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._what = ""
        self._detail = ""
        self._started_s = 0.0
        self._shown: tuple[float, str] = (0.0, "")
        self._status = console.status("")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._what, self._detail, self._started_s = what, "", time.monotonic()
        self._shown = (self._started_s, "")
        if self._live:
            self._status.start()
        try:
            self.tick()
            yield
        except BaseException:
            self._end("[red]✗[/]")
            raise
        self._end("[green]✓[/]")

    def detail(self, text: str) -> None:
        self._detail = text
        self.tick()

    def tick(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        if self._live:
            width = max(20, self._console.width - 4)
            self._status.update(escape(f"{self._what}  {elapsed_s:.0f} s  {self._detail}"[:width]))
            return
        shown_at_s, shown = self._shown
        if (self._detail and self._detail != shown) or time.monotonic() - shown_at_s >= _PLAIN_INTERVAL_S:
            self._shown = (time.monotonic(), self._detail)
            self._print(escape(f"  {self._what} ({elapsed_s:.0f} s) {self._detail}".rstrip()))

    def say(self, text: str) -> None:
        self._print(escape(text))

    def _end(self, mark: str) -> None:
        self._status.stop()
        self._print(f"{mark} {escape(self._what)} [dim]{time.monotonic() - self._started_s:.1f} s[/]")

    def _print(self, markup: str) -> None:
        self._console.print(markup, highlight=False, soft_wrap=True)


class NoProgress:
    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        yield

    def detail(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass
