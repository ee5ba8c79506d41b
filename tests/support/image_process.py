"""An image process without vLLM: an image's file says what becomes of it."""

from __future__ import annotations

import os
import socket
import sys
from array import array

import msgspec

from kvferry.engine.base import Sampling
from kvferry.engine.forks import ForkLimits, ForkServer
from kvferry.engine.image_chats import (
    ImageChat,
    PlacedImage,
    PreparedImage,
    PromptUpdate,
    RefusedChat,
    RenderedChat,
)

from .grammar_process import compile_spec

TOKENS_PER_IMAGE = 4
UPDATES = (PromptUpdate("replace", (7,), (7,) * TOKENS_PER_IMAGE),)


def work(payload: bytes) -> bytes:
    chat = msgspec.msgpack.decode(payload, type=ImageChat)
    placed = []
    for i, image in enumerate(chat.images):
        text = image.data.decode()
        match text.partition(" ")[0]:
            case "refuse-image":
                return msgspec.msgpack.encode(RefusedChat("invalid_request", f"{image.where}: bad", image.where))
            case "no-code":
                return msgspec.msgpack.encode(RefusedChat("no such code", "bad", None))
            case "garbage":
                return b"garbage"
            case "nothing":
                return b""
            case "few":
                return msgspec.msgpack.encode(RenderedChat(b"", Sampling(1), None, ()))
            case "overlap":
                placed.append(PlacedImage(0, TOKENS_PER_IMAGE, PreparedImage(b"x", UPDATES)))
                continue
            case "beyond":
                placed.append(PlacedImage(1000, TOKENS_PER_IMAGE, PreparedImage(b"x", UPDATES)))
                continue
            case "size":
                features = bytes(int(text.split()[1]))
            case "":  # prepared before
                features = b""
            case _:
                compile_spec(text)
                features = b"features of " + image.data
        prepared = PreparedImage(features, UPDATES) if image.prepared is None else None
        placed.append(PlacedImage(i * TOKENS_PER_IMAGE, TOKENS_PER_IMAGE, prepared))
    tokens = array("I", range(TOKENS_PER_IMAGE * len(chat.images) + 1))
    return msgspec.msgpack.encode(RenderedChat(tokens.tobytes(), Sampling(max_tokens=3), None, tuple(placed)))


if __name__ == "__main__":
    with socket.socket(fileno=os.dup(0)) as connection:
        ForkServer(connection, work, msgspec.json.decode(sys.argv[-1], type=ForkLimits)).run()
