"""All errors as one tree, each with its HTTP and gRPC status.

Messages appear in error bodies: they say what was wrong and what is allowed, never a traceback. A message that repeats
what a client sent may be of any length; MAX_ERROR_BYTES of it are kept.
"""

from __future__ import annotations

from typing import ClassVar

# In UTF-8. Errors of requests stand in bodies and logs, and travel from workers in steps.
MAX_ERROR_BYTES = 1024
MAX_PARAM_BYTES = 128

_TAIL_BYTES = 256  # of a shortened message: an end often says what is allowed


class KvferryError(Exception):
    """Root of the tree. `message` is safe to show to a client, and short."""

    is_of_a_request: ClassVar[bool] = True
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    openai_type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        if self.is_of_a_request:
            message = shortened(message, MAX_ERROR_BYTES, _TAIL_BYTES)
        super().__init__(message)
        self.message = message
        self.param = param if param is None else shortened(param, MAX_PARAM_BYTES)
        self.retry_after_s = retry_after_s


class ConfigError(KvferryError):
    """An unusable configuration; the message names the key, the value and what is allowed."""

    is_of_a_request = False
    grpc_status = "FAILED_PRECONDITION"
    openai_type = "config_error"


class LocalError(KvferryError):
    """A command on this machine failed. Never reaches a client, so its kinds need no code."""

    is_of_a_request = False
    grpc_status = "FAILED_PRECONDITION"
    openai_type = "local_error"


class Interrupted(LocalError):
    """A signal ended it."""


class RequestError(KvferryError):
    """The request cannot be served as it was sent."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"


class InvalidRequest(RequestError):
    """Malformed, of the wrong type, or unsupported."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class Unauthenticated(RequestError):
    """No key, an unknown key, or no client certificate. The message never repeats a key."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    """The client is known and not allowed to do this."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    openai_type = "permission_error"
    code = "permission_denied"


class BodyTooLarge(RequestError):
    """The body exceeds the gateway's limit."""

    http_status = 413
    # Not RESOURCE_EXHAUSTED: that asks clients to send it again.
    grpc_status = "INVALID_ARGUMENT"
    code = "body_too_large"


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"
    code = "body_timeout"


class HeadersTimeout(RequestError):
    """The headers did not arrive in time."""

    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"
    code = "headers_timeout"


class HeadersTooLarge(RequestError):
    """The headers exceed the gateway's limits."""

    http_status = 431
    code = "headers_too_large"


class UrlTooLong(RequestError):
    """The URL exceeds the gateway's limit."""

    http_status = 414
    code = "url_too_long"


class UnsupportedMediaType(RequestError):
    """The body's `Content-Type` is not JSON's."""

    http_status = 415
    code = "unsupported_media_type"


class ModelNotFound(RequestError):
    """The model is not served here."""

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

    def __init__(self, message: str, *, allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed


class UnavailableError(KvferryError):
    """The same request may succeed later."""

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
    """The link to a worker broke while a request was on it; `has_vanished`: the worker went away without a word."""

    code = "worker_lost"

    def __init__(self, message: str, *, has_vanished: bool = False) -> None:
        super().__init__(message)
        self.has_vanished = has_vanished


class WorkerDraining(UnavailableError):
    """A leaving worker refused the request; its engine never saw it."""

    code = "worker_draining"


class EngineDead(UnavailableError):
    """An engine died or hangs; its worker is replaced.

    `is_blameless`: another request, of any gateway, is suspect.
    """

    code = "engine_dead"

    def __init__(self, message: str, *, is_blameless: bool = False) -> None:
        super().__init__(message)
        self.is_blameless = is_blameless


class PagesNotMoved(UnavailableError):
    """Pages of a prompt's images did not reach their engine, which has not the images themselves."""

    code = "pages_not_moved"


class Overloaded(KvferryError):
    """More requests than may wait."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_exceeded"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = 1) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class TenantOverloaded(Overloaded):
    """More requests of the tenant than may wait beside those of others."""

    code = "tenant_overloaded"


class TenantLimited(Overloaded):
    """A limit of the tenant's contract; the message names it."""

    code = "tenant_limited"


class Preempted(Overloaded):
    """Its slot went to a tenant below its share. Clients see it only where it cannot go on in time."""

    code = "preempted"


class DeadlineExceeded(KvferryError):
    """The time allowed for the request ran out."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    openai_type = "timeout"
    code = "deadline_exceeded"


class EngineError(KvferryError):
    """The engine failed on one request and goes on."""

    code = "engine_error"


class Quarantined(EngineError):
    """Workers were lost while they computed the request; it is not tried again for some minutes."""

    code = "request_quarantined"


class UnsupportedEngine(EngineError):
    """The engine cannot be built as configured; the message names the setting."""

    code = "unsupported_engine"


class TierError(KvferryError):
    """An unusable volume; the message names its folder. A single bad chunk is a miss instead."""

    code = "tier_error"


def printable(text: str) -> str:
    """Return `text` without characters that a terminal obeys."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def shortened(text: str, max_bytes: int, tail_bytes: int = 0) -> str:
    """Return `text` in at most `max_bytes` of UTF-8. A long one keeps its beginning, and `tail_bytes` of its end."""
    if 4 * len(text) <= max_bytes:  # no character has more bytes
        return text
    raw = text.encode(errors="surrogatepass")
    if len(raw) <= max_bytes:
        return text
    note = f" ... ({len(raw)} bytes in all) ... "
    head = raw[: max_bytes - tail_bytes - len(note)].decode(errors="ignore")
    return head + note + raw[len(raw) - tail_bytes :].decode(errors="ignore")


def by_code() -> dict[str, type[KvferryError]]:
    """Return the leaves that have a code, under which errors travel between processes."""

    def leaves(kind: type[KvferryError]) -> list[type[KvferryError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]

    return {kind.code: kind for kind in leaves(KvferryError) if kind.code is not None}
