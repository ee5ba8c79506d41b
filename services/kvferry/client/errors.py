"""What a call may fail with, as one tree.

CallFailed
├── InvalidArgument     `violations` name the fields
├── Unauthenticated     no key, one that is not known
├── PermissionDenied
├── NotFound            such as a model that is not served
├── Overloaded          come back after `retry_after_s`
├── Unavailable         nobody could answer; the same call may succeed later
└── DeadlineExceeded
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Violation:
    """A field of the request, such as `sampling.max_tokens`, and what is wrong with it."""

    field: str
    description: str


class CallFailed(Exception):
    """A call that ended without its answer. `reason` is for programs (`OVERLOADED`), `message` for people."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s


class InvalidArgument(CallFailed):
    """The request cannot be served as it was sent."""


class Unauthenticated(CallFailed):
    """The endpoint does not know who asks."""


class PermissionDenied(CallFailed):
    """The endpoint knows who asks, and they may not."""


class NotFound(CallFailed):
    """There is no such thing."""


class Overloaded(CallFailed):
    """More requests than may wait."""


class Unavailable(CallFailed):
    """Nobody could answer, or nobody could be reached."""


class DeadlineExceeded(CallFailed):
    """The time for the call was over."""


_CODE_TO_KIND: dict[grpc.StatusCode, type[CallFailed]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def failure_of(error: grpc.RpcError | grpc.aio.AioRpcError) -> CallFailed:
    """What a call's error says, its google.rpc details included."""
    assert isinstance(error, (grpc.Call, grpc.aio.AioRpcError))
    code = error.code()
    reason, violations, retry_after_s = "", [], None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, request, retry = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(request):
                violations += [Violation(each.field, each.description) for each in request.field_violations]
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return _CODE_TO_KIND.get(code, CallFailed)(
        code, error.details() or "", reason=reason, violations=tuple(violations), retry_after_s=retry_after_s
    )
