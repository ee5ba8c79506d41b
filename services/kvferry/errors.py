"""Everything that can go wrong, as one tree; each leaf knows its HTTP status and its gRPC status.

    KvferryError
    ├── ConfigError                  start-up; the command exits with 2
    ├── LocalError                   a command on this machine, which exits with 1; its kinds stand in local/
    ├── RequestError                 the client's to mend
    │   ├── InvalidRequest           400  INVALID_ARGUMENT
    │   │   └── ContextLengthExceeded
    │   ├── Unauthenticated          401  UNAUTHENTICATED
    │   ├── PermissionDenied         403  PERMISSION_DENIED
    │   ├── BodyTooLarge             413  INVALID_ARGUMENT
    │   ├── BodyTimeout              408  DEADLINE_EXCEEDED
    │   ├── ModelNotFound            404  NOT_FOUND
    │   ├── RouteNotFound            404  UNIMPLEMENTED
    │   └── MethodNotAllowed         405  UNIMPLEMENTED
    ├── UnavailableError             503  UNAVAILABLE, with Retry-After
    │   ├── NotReady                 this gateway cannot serve yet
    │   ├── NoDecodeWorker           nobody can generate
    │   ├── WorkerLost               the stream to a worker broke
    │   ├── WorkerDraining           a worker that leaves takes nothing new
    │   └── EngineDead               a worker's engine is gone and will not come back
    ├── Overloaded                   429  RESOURCE_EXHAUSTED, with Retry-After
    ├── DeadlineExceeded             504  DEADLINE_EXCEEDED
    ├── EngineError                  500  INTERNAL
    │   └── UnsupportedEngine        the engine cannot be built as configured
    └── TierError                    500  INTERNAL, a volume that cannot be used; pages that cannot are misses

A message is written for the reader of an error body: what was wrong and what is allowed, never a traceback.
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
    """A configuration that cannot be used: names the key, the value and what is allowed."""

    grpc_status = "FAILED_PRECONDITION"
    openai_type = "config_error"


class LocalError(KvferryError):
    """What keeps a command on this machine from its end. Never reaches a client, so its kinds need no code."""

    grpc_status = "FAILED_PRECONDITION"
    openai_type = "local_error"


class RequestError(KvferryError):
    """The request cannot be served as it was sent."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"


class InvalidRequest(RequestError):
    """Malformed, of the wrong type, or asking for something unsupported."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together do not fit the model's context."""

    code = "context_length_exceeded"


class Unauthenticated(RequestError):
    """Nobody who may ask: no key, one that is not known, or no client certificate. Never repeats what was shown."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    """Somebody who is known, and may not."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    openai_type = "permission_error"
    code = "permission_denied"


class BodyTooLarge(RequestError):
    """The body is over the gateway's limit."""

    http_status = 413
    # Not RESOURCE_EXHAUSTED: that asks clients to send it again.
    grpc_status = "INVALID_ARGUMENT"
    code = "body_too_large"


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"
    code = "body_timeout"


class ModelNotFound(RequestError):
    """No such model is served here."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    code = "model_not_found"


class RouteNotFound(RequestError):
    """No such path."""

    http_status = 404
    grpc_status = "UNIMPLEMENTED"
    code = "route_not_found"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    http_status = 405
    grpc_status = "UNIMPLEMENTED"
    code = "method_not_allowed"


class UnavailableError(KvferryError):
    """Cannot be served now; the same request may succeed later."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    openai_type = "service_unavailable"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = 2) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class NotReady(UnavailableError):
    """This gateway cannot serve yet."""

    code = "not_ready"


class NoDecodeWorker(UnavailableError):
    """No decode worker is connected."""

    code = "no_decode_worker"


class WorkerLost(UnavailableError):
    """The stream to a worker broke while a request was on it."""

    code = "worker_lost"


class WorkerDraining(UnavailableError):
    """A worker that leaves refused the request; its engine never saw it."""

    code = "worker_draining"


class EngineDead(UnavailableError):
    """An engine process died; its worker leaves and is replaced."""

    code = "engine_dead"


class Overloaded(KvferryError):
    """More requests than may wait."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_exceeded"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = 1) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class DeadlineExceeded(KvferryError):
    """The time allowed for the request ran out."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    openai_type = "timeout"
    code = "deadline_exceeded"


class EngineError(KvferryError):
    """The engine failed on one request; the engine itself goes on."""

    code = "engine_error"


class UnsupportedEngine(EngineError):
    """The engine cannot be built as configured; the message says which setting and what is allowed."""

    code = "unsupported_engine"


class TierError(KvferryError):
    """A volume that cannot be used: names the folder and what is wrong. A single bad page is a miss, never an error."""

    code = "tier_error"


def by_code() -> dict[str, type[KvferryError]]:
    """Every leaf that has a code: how an error crosses the wire between our processes and stays itself."""

    def leaves(kind: type[KvferryError]) -> list[type[KvferryError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]

    return {kind.code: kind for kind in leaves(KvferryError) if kind.code is not None}
