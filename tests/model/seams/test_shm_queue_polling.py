"""engine/vllm/plugins/shm_queue_polling.py"""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.vllm


class TestShmQueuePolling:
    """engine/vllm/plugins/shm_queue_polling.py"""

    def test_readers_yield_through_the_name_we_replace(self) -> None:
        from vllm.distributed.device_communicators import shm_broadcast

        assert "sched_yield()" in inspect.getsource(shm_broadcast.SpinCondition.wait)
        assert "from vllm.distributed.utils import StatelessProcessGroup, sched_yield" in inspect.getsource(
            shm_broadcast
        )
