"""What tests of every kind share.

This folder is on the import path, so that helpers such as `etcd_server` are importable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import hypothesis
import pytest_asyncio
from vllm_engines import VllmPair, start_pair

# A machine that does other work too is slow, not wrong.
hypothesis.settings.register_profile("kvferry", deadline=None)
hypothesis.settings.load_profile("kvferry")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_pair() -> AsyncIterator[VllmPair]:
    """Real engines, started once for the whole session (about a minute)."""
    pair = await start_pair()
    try:
        yield pair
    finally:
        await pair.stop()
