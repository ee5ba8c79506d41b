"""engine/vllm/plugins/nixl/nixl_handshake_port.py"""

from __future__ import annotations

import inspect
import socket
import threading
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.util.addresses import free_port

from .support import parameters

pytestmark = [pytest.mark.vllm]


class TestNixlHandshakePort:
    """engine/vllm/plugins/nixl/nixl_handshake_port.py"""

    def test_vllm_still_has_what_is_wrapped(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, connector, pull_scheduler

        scheduler = base_scheduler.NixlBaseConnectorScheduler
        assert parameters(scheduler.set_xfer_handshake_metadata) == ["self", "metadata"]
        assert parameters(scheduler._nixl_handshake_listener) == [
            *("encoded_data", "ready_event", "stop_event", "host", "port")
        ]
        source = inspect.getsource(scheduler.set_xfer_handshake_metadata)
        assert "target=self._nixl_handshake_listener" in source
        assert "ready_event.wait()" in source
        # The port is read when a ticket is made, not when the scheduler is.
        assert "remote_port=self.side_channel_port" in inspect.getsource(pull_scheduler)
        announce = inspect.getsource(connector.NixlBaseConnector.set_xfer_handshake_metadata_pp_aware)
        assert "self.connector_scheduler.set_xfer_handshake_metadata(metadata)" in announce

    @staticmethod
    def scheduler(host: str, port: int) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

        from kvferry.engine.vllm.plugins.nixl.nixl_handshake_port import retry_taken_handshake_ports

        scheduler = NixlBaseConnectorScheduler.__new__(NixlBaseConnectorScheduler)
        scheduler._nixl_handshake_listener_t = None
        scheduler._stop_event = threading.Event()
        scheduler.side_channel_host, scheduler.side_channel_port = host, port
        retry_taken_handshake_ports(scheduler)
        return scheduler

    @staticmethod
    def metadata() -> dict[tuple[int, int], Any]:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

        return {(0, 0): NixlHandshakePayload(compatibility_hash="h", agent_metadata_bytes=b"agent")}

    @staticmethod
    def stop(scheduler: Any) -> None:
        scheduler._stop_event.set()
        scheduler._nixl_handshake_listener_t.join()

    @pytest.mark.parametrize("taken", [False, True])
    def test_peers_reach_the_listener_at_the_port_of_tickets(self, taken: bool) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

        with socket.socket() as other:
            port = free_port()
            if taken:
                other.bind(("127.0.0.1", port))
                other.listen()
            scheduler = self.scheduler("127.0.0.1", port)
            scheduler.set_xfer_handshake_metadata(self.metadata())
            try:
                assert (scheduler.side_channel_port != port) == taken
                with zmq.Context() as context, context.socket(zmq.REQ) as peer:
                    peer.setsockopt(zmq.LINGER, 0)
                    peer.setsockopt(zmq.RCVTIMEO, 10_000)
                    peer.connect(f"tcp://127.0.0.1:{scheduler.side_channel_port}")
                    peer.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
                    assert b"agent" in peer.recv_multipart()[0]
            finally:
                self.stop(scheduler)

    def test_an_address_that_cannot_be_bound_is_an_error_that_names_it(self) -> None:
        # 192.0.2.1 is reserved for documentation: no interface has it.
        scheduler = self.scheduler("192.0.2.1", free_port())
        with pytest.raises(RuntimeError, match=r"192\.0\.2\.1.*engine\.side_channel_host"):
            scheduler.set_xfer_handshake_metadata(self.metadata())

    def test_tries_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvferry.engine.vllm.plugins.nixl import nixl_handshake_port

        tried: list[str] = []
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            monkeypatch.setattr(nixl_handshake_port, "free_port", lambda host: tried.append(host) or port)
            scheduler = self.scheduler("127.0.0.1", port)
            with pytest.raises(RuntimeError, match="Address already in use"):
                scheduler.set_xfer_handshake_metadata(self.metadata())
        assert len(tried) == nixl_handshake_port.MAX_TRIES - 1

    def test_without_a_free_port_the_start_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvferry.engine.vllm.plugins.nixl import nixl_handshake_port

        def no_port(host: str) -> int:
            raise OSError("none is left")

        monkeypatch.setattr(nixl_handshake_port, "free_port", no_port)
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            scheduler = self.scheduler("127.0.0.1", other.getsockname()[1])
            with pytest.raises(RuntimeError, match="none is left"):
                scheduler.set_xfer_handshake_metadata(self.metadata())
