"""Fixtures of tests with vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine_forks import forked_engines


@pytest.fixture(scope="session", autouse=True)
def engines_start_as_forks() -> Iterator[None]:
    with forked_engines():
        yield
