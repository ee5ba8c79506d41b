"""An OpenAI stream as it arrives: when each token's text came, and what the server says of itself at the end."""

from __future__ import annotations

import contextlib

import msgspec

from kvferry_loadtest.apis import Usage

MAX_ERROR_CHARS = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None  # chat
    text: str | None = None  # completions
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_chunk = msgspec.json.Decoder(_Chunk)


class StreamReader:
    """Feed it bytes with the time they came at. After the end, `error` says what was wrong with the stream.

    One event with text is one entry of `token_s`: servers that put several tokens into an event are seen as they are.
    """

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self.pieces: list[str] = []
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.is_done = False  # [DONE] was seen
        self.error = ""
        self._rest = b""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def feed(self, data: bytes, now_s: float) -> None:
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n") if b"\n" in event else (event,):
                if line.startswith(b"data:"):
                    self._take(line[5:].strip(), now_s)

    def finish(self) -> None:
        """The body is over."""
        if not self.error and not self.is_done and not self.finish_reason:
            self.error = "the stream ended without its end"

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _chunk.decode(payload)
        except msgspec.MsgspecError as error:
            self.error = self.error or f"an event that cannot be read: {error}"[:MAX_ERROR_CHARS]
            return
        if bytes(chunk.error) not in (b"", b"null"):
            self.error = self.error or error_text(bytes(chunk.error))
        if chunk.usage is not None:
            told = chunk.usage
            cached = told.prompt_tokens_details.cached_tokens if told.prompt_tokens_details is not None else None
            self.usage = Usage(told.prompt_tokens, told.completion_tokens, cached)
        has_text = False
        for choice in chunk.choices:
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
            if choice.text:
                self.pieces.append(choice.text)
                has_text = True
            elif (delta := choice.delta) is not None:
                if delta.content:
                    self.pieces.append(delta.content)
                    has_text = True
                has_text = has_text or bool(delta.reasoning_content or delta.reasoning or delta.tool_calls)
        if has_text:
            self.token_s.append(now_s)


class _Error(msgspec.Struct):
    message: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None
    detail: str | None = None


def error_text(body: bytes) -> str:
    """An error's message, short and on one line: OpenAI's shape (whole, or what is in `error`), FastAPI's, or any."""
    text = ""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        decoded = msgspec.json.decode(body, type=_ErrorBody)
        inner = decoded.error.message if isinstance(decoded.error, _Error) else decoded.error
        text = inner or decoded.message or decoded.detail or ""
    text = " ".join((text or body.decode("utf-8", "replace")).split())
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"
