"""Which error of a client a status of gRPC becomes."""

from __future__ import annotations

import grpc
import pytest

from kvferry_client.errors import CallFailed, Unavailable, failure_of


def test_a_call_that_the_other_end_cancelled_may_succeed_later() -> None:
    nothing = grpc.aio.Metadata()
    failed = failure_of(grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, "CANCELLED"))
    assert type(failed) is Unavailable
    assert failed.code is grpc.StatusCode.CANCELLED


def test_a_call_that_the_client_cancelled_did_not_find_its_cluster_unavailable() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_stream("/package.Service/Method")(b"", wait_for_ready=True)
        call.cancel()
        with pytest.raises(grpc.RpcError) as ended:
            next(call)
    failed = failure_of(ended.value)
    assert type(failed) is CallFailed
    assert failed.code is grpc.StatusCode.CANCELLED
