"""Conversion of errors to google.rpc statuses."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvferry.errors import KvferryError, RequestError

DOMAIN = "kvferry"

# A status travels in headers, twice, percent-encoded the first time: far below the 8 KiB that peers take.
MAX_MESSAGE_BYTES = 1000


def status_of(error: KvferryError) -> grpc.Status:
    """Return code, message and details: ErrorInfo, BadRequest for a field, RetryInfo for a possible retry."""
    code = grpc.StatusCode[error.grpc_status]
    message = _short(error.message)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN)]
    if isinstance(error, RequestError) and error.param and code is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_short(error.param), description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=error.retry_after_s)))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=packed))
    return status


def _reason(error: KvferryError) -> str:
    return (error.code or "internal").upper()


def _short(text: str) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"
