"""Errors of calls.

CallFailed
├── InvalidArgument     `violations` name the fields
├── Unauthenticated     no key, or an unknown one
├── PermissionDenied    the client is known and may not do this
├── NotFound            such as a model that is not served
├── Overloaded          retry after `retry_after_s`
├── Unavailable         no answer, or no connection; the same call may succeed later
└── DeadlineExceeded
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS = "grpc-status-details-bin"
_TOO_LARGE = "message larger than max"


@dataclass(frozen=True, slots=True)
class Violation:
    """A field of the request, such as `sampling.max_tokens`, and its fault."""

    field: str
    description: str


class CallFailed(Exception):
    """A call that failed. `reason` is for programs (`OVERLOADED`), `message` for people."""

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
    pass


class Unauthenticated(CallFailed):
    pass


class PermissionDenied(CallFailed):
    pass


class NotFound(CallFailed):
    pass


class Overloaded(CallFailed):
    pass


class Unavailable(CallFailed):
    pass


class DeadlineExceeded(CallFailed):
    pass


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
    """Convert a gRPC error with its google.rpc details."""
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
    kind = _CODE_TO_KIND.get(code, CallFailed)
    if code is grpc.StatusCode.CANCELLED and not (isinstance(error, grpc.Future) and error.cancelled()):
        kind = Unavailable  # by gRPC, at a gateway that began to drain before this client knew
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not reason and _TOO_LARGE in (error.details() or ""):
        kind, reason = InvalidArgument, "BODY_TOO_LARGE"  # from gRPC itself, before the gateway sees the call
    return kind(code, error.details() or "", reason=reason, violations=tuple(violations), retry_after_s=retry_after_s)
