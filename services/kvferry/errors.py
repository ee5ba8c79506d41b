"""All errors as one tree; each leaf has its HTTP and gRPC status.

    KvferryError
    ├── ConfigError                  start-up; the message names key, value and what is allowed; exit code 2
    ├── LocalError                   a command on this machine failed; never reaches a client; exit code 1
    ├── RequestError                 the request cannot be served as it was sent
    │   ├── InvalidRequest           400  INVALID_ARGUMENT: malformed, of the wrong type, or unsupported
    │   │   └── ContextLengthExceeded     prompt and answer do not fit the model's context
    │   ├── Unauthenticated          401  UNAUTHENTICATED; the message never repeats a key
    │   ├── PermissionDenied         403  PERMISSION_DENIED
    │   ├── BodyTooLarge             413  INVALID_ARGUMENT
    │   ├── BodyTimeout              408  DEADLINE_EXCEEDED
    │   ├── ModelNotFound            404  NOT_FOUND
    │   ├── RouteNotFound            404  UNIMPLEMENTED
    │   └── MethodNotAllowed         405  UNIMPLEMENTED
    ├── UnavailableError             503  UNAVAILABLE, with Retry-After
    │   ├── NotReady                 this gateway cannot serve yet
    │   ├── NoDecodeWorker           no decode worker is connected
    │   ├── WorkerLost               the link to a worker broke while a request was on it
    │   ├── WorkerDraining           a leaving worker refused the request; its engine never saw it
    │   └── EngineDead               a worker's engine process died; the worker is replaced
    ├── Overloaded                   429  RESOURCE_EXHAUSTED, with Retry-After
    ├── DeadlineExceeded             504  DEADLINE_EXCEEDED
    ├── EngineError                  500  INTERNAL: the engine failed on one request and goes on
    │   └── UnsupportedEngine        the engine cannot be built as configured; the message names the setting
    └── TierError                    500  INTERNAL: an unusable volume; a single bad chunk is a miss instead

Messages appear in error bodies: they say what was wrong and what is allowed, never a traceback.
"""

from __future__ import annotations

from typing import ClassVar


class KvferryError(Exception):
    """Root of the tree. `message` is safe to show to a client."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    openai_type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ConfigError(KvferryError):
    grpc_status = "FAILED_PRECONDITION"
    openai_type = "config_error"


class LocalError(KvferryError):
    grpc_status = "FAILED_PRECONDITION"
    openai_type = "local_error"


class RequestError(KvferryError):
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"


class InvalidRequest(RequestError):
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthenticated(RequestError):
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    openai_type = "permission_error"
    code = "permission_denied"


class BodyTooLarge(RequestError):
    http_status = 413
    # Not RESOURCE_EXHAUSTED: that asks clients to send it again.
    grpc_status = "INVALID_ARGUMENT"
    code = "body_too_large"


class BodyTimeout(RequestError):
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"
    code = "body_timeout"


class ModelNotFound(RequestError):
    http_status = 404
    grpc_status = "NOT_FOUND"
    code = "model_not_found"


class RouteNotFound(RequestError):
    http_status = 404
    grpc_status = "UNIMPLEMENTED"
    code = "route_not_found"


class MethodNotAllowed(RequestError):
    http_status = 405
    grpc_status = "UNIMPLEMENTED"
    code = "method_not_allowed"


class UnavailableError(KvferryError):
    http_status = 503
    grpc_status = "UNAVAILABLE"
    openai_type = "service_unavailable"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = 2) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class NotReady(UnavailableError):
    code = "not_ready"


class NoDecodeWorker(UnavailableError):
    code = "no_decode_worker"


class WorkerLost(UnavailableError):
    code = "worker_lost"


class WorkerDraining(UnavailableError):
    code = "worker_draining"


class EngineDead(UnavailableError):
    code = "engine_dead"


class Overloaded(KvferryError):
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_exceeded"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = 1) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class DeadlineExceeded(KvferryError):
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    openai_type = "timeout"
    code = "deadline_exceeded"


class EngineError(KvferryError):
    code = "engine_error"


class UnsupportedEngine(EngineError):
    code = "unsupported_engine"


class TierError(KvferryError):
    code = "tier_error"


def by_code() -> dict[str, type[KvferryError]]:
    """Return the leaves that have a code, under which errors travel between processes."""

    def leaves(kind: type[KvferryError]) -> list[type[KvferryError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]

    return {kind.code: kind for kind in leaves(KvferryError) if kind.code is not None}
