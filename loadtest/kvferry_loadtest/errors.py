"""Errors before or around a run.

    LoadtestError           the user has to change something; one line, exit code 2
    ├── ScenarioError       a scenario file: the file, the key, the value
    ├── TraceError          a trace file: the file, the line, the field
    ├── TargetError         the endpoint: unreachable, does not know the model
    │   └── KeyRefused
    └── ResultError         a result file that is none, or of another version

What a request under load meets is no error of the run: it is counted (see `record.Outcome`).
"""

from __future__ import annotations


class LoadtestError(Exception):
    """`str(error)` is one line for the user."""


class ScenarioError(LoadtestError):
    pass


class TraceError(LoadtestError):
    pass


class TargetError(LoadtestError):
    pass


class KeyRefused(TargetError):
    """`reason` is what the endpoint said."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: refuses the key: {reason}")
        self.reason = reason


class ResultError(LoadtestError):
    pass
