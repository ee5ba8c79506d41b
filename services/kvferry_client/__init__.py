"""Typed clients of kvferry's gRPC endpoint: `Client`, and `AsyncClient` for asyncio.

Answers are the endpoint's own messages (proto/kvferry/inference/v1/inference.proto), errors are kinds of `CallFailed`.
"""

__version__ = "0.1.0"

from kvferry.inference.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    Answer,
    Choices,
    GenerateChunk,
    GenerateResponse,
    Message,
    Model,
    StructuredOutput,
    TokenizeResponse,
    Tool,
    ToolCall,
    Usage,
)
from kvferry_client.asynchronous import AsyncAnswerStream, AsyncClient
from kvferry_client.calls import MessageLike, SamplingOptions
from kvferry_client.connection import Tls
from kvferry_client.errors import (
    CallFailed,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvferry_client.synchronous import AnswerStream, Client

__all__ = [
    "FINISH_REASON_LENGTH",
    "FINISH_REASON_STOP",
    "FINISH_REASON_TOOL_CALLS",
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "CallFailed",
    "Choices",
    "Client",
    "DeadlineExceeded",
    "GenerateChunk",
    "GenerateResponse",
    "InvalidArgument",
    "Message",
    "MessageLike",
    "Model",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "SamplingOptions",
    "StructuredOutput",
    "Tls",
    "TokenizeResponse",
    "Tool",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
