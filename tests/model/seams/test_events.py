"""engine/vllm/events.py"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.model

pytest.importorskip("vllm")


class TestEvents:
    """engine/vllm/events.py"""

    def test_there_are_no_other_kinds_of_events(self) -> None:
        from vllm.distributed import kv_events

        kinds = {kind.__name__ for kind in kv_events.KVCacheEvent.__subclasses__()}
        assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
