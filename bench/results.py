"""Output of a benchmark: each figure when it is measured, and all of them at its end, also where something failed."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.errors import KvferryError


class BenchFailed(Exception):
    """Ends a benchmark with exit code 1; the message names the request, engine, answer or limit, and the reason."""


class Results:
    """Figures of one run by name. Each one is a line of JSON on stdout when it is added."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add figures: of equal names, dictionaries are merged, lists are joined, and other values replaced."""
        line = json.dumps(figures)
        _merge(self.figures, json.loads(line))  # a copy: what is merged into it later is not the caller's
        print(line, flush=True)


def _merge(into: dict[str, Any], figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        before = into.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            before.extend(value)
        else:
            into[name] = value


def run_benchmark(name: str, measure: Callable[[Results], None]) -> int:
    """Run `measure` and print all figures as the last line. Return 0, 1 where it raised, 130 where it was interrupted.

    The last line has `failure` where it raised: the message of BenchFailed and KvferryError, and of other exceptions,
    which are faults of the benchmark and have a traceback on stderr, the type as well.
    """
    results, failure, exit_code = Results(), "", 0
    try:
        measure(results)
    except KeyboardInterrupt:
        failure, exit_code = "interrupted", 130
    except Exception as error:
        first = _first_of(error)
        failure, exit_code = str(first), 1
        if not isinstance(first, (BenchFailed, KvferryError)):
            traceback.print_exception(error)
            failure = f"{type(first).__name__}: {first}"
    if failure:
        print(f"{name}: {failure}", file=sys.stderr, flush=True)
        results.figures["failure"] = failure
    print(json.dumps(results.figures), flush=True)
    return exit_code


def _first_of(error: BaseException) -> BaseException:
    """Return the error that ended a group of tasks first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
