"""engine/vllm/plugins/nixl/nixl_connector.py"""

from __future__ import annotations

import dataclasses
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.util.addresses import ucx_environment
from support.waiting import PATIENCE_S

from .support import parameters

pytestmark = pytest.mark.vllm


class TestNixlConnector:
    """engine/vllm/plugins/nixl/nixl_connector.py"""

    def test_the_pin_that_we_undo_is_still_there(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        source = inspect.getsource(NixlBaseConnectorWorker.__init__)
        assert "os.sched_setaffinity(0, rsv_cores_for_kv)" in source
        assert "self._physical_blocks_per_logical_kv_block" in source

    def test_the_connector_takes_what_ours_takes(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

        assert parameters(NixlPullConnector.__init__) == ["self", "vllm_config", "role", "kv_cache_config"]

    def test_unequal_block_sizes_fail_the_handshake(self) -> None:
        from kvferry.engine.vllm.plugins.nixl.nixl_connector import refuse_unequal_block_sizes

        def remote(block_size: int, blocks_per_page: int = 1) -> SimpleNamespace:
            return SimpleNamespace(
                engine_id="e", block_size=block_size, physical_blocks_per_logical_kv_block=blocks_per_page
            )

        name = b"agent"  # NIXL's names are bytes: a text made of one is the name of no agent, and its notices get lost
        worker = SimpleNamespace(
            block_size=32, _physical_blocks_per_logical_kv_block=2, add_remote_agent=lambda meta, *a, **k: name
        )
        refuse_unequal_block_sizes(worker)
        assert worker.add_remote_agent(remote(64), remote_tp_size=1) is name
        assert worker.add_remote_agent(remote(32, 2)) is name
        with pytest.raises(RuntimeError, match="has 32 tokens per page, this engine has 64"):
            worker.add_remote_agent(remote(32))

    def test_the_handshake_says_what_we_compare(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

        fields = {field.name for field in dataclasses.fields(NixlAgentMetadata)}
        assert {"engine_id", "block_size", "physical_blocks_per_logical_kv_block"} <= fields
        assert parameters(NixlBaseConnectorWorker.add_remote_agent)[1] == "nixl_agent_meta"


AGENT = """
from nixl._api import nixl_agent, nixl_agent_config

nixl_agent("agent", nixl_agent_config(backends=["UCX"]))
"""
# NIXL looks for GPUs where the kernel lists PCI devices.
BESIDE_A_GPU = 'mount --bind "$0" /sys/bus/pci/devices && exec "$@"'


def test_an_agent_on_the_cpu_starts_beside_a_gpu(tmp_path: Path) -> None:
    beside_a_gpu = ["unshare", "--mount", "sh", "-c", BESIDE_A_GPU, str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*beside_a_gpu, "true"], check=False).returncode:
        pytest.skip("this user cannot imitate PCI devices here")
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "vendor").write_text("0x10de")
    (tmp_path / "0000:01:00.0" / "class").write_text("0x030200")

    def start(**changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*beside_a_gpu, sys.executable, "-c", AGENT],
            env=os.environ | ucx_environment("127.0.0.1", tmp_path) | changed,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    assert "add cuda_copy" in (refused := start(UCX_TLS="tcp,cma,sm,self")).stderr.lower(), refused
    assert (started := start()).returncode == 0, started
