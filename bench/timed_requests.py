"""Requests whose times `bench.cache_timing` compares. Each has content that follows from a number, made anew each time.

The content is made before a request is timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import random
import string
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.engine_device import engine_config, model_config
from bench.vllm_engines import answer
from kvferry.config import ClusterConfig, JwtConfig, ModelConfig
from kvferry.engine.base import (
    Asker,
    ChatImage,
    EngineRequest,
    PromptImage,
    RequestId,
    Sampling,
    TenantName,
)
from kvferry.errors import NotReady, Unauthenticated
from kvferry.gateway.identity.jwt_tokens import JwtTokens
from kvferry.gateway.identity.tenants import Tenants
from kvferry.gateway.lifecycle import build_renderer

_LONG_WORD = 250  # letters; tokenizers keep words of up to 255 bytes
_NUM_WORDS = 4
_NUM_NAMES = 2  # of 128 that vLLM keeps
_IMAGE_SIZE = 64  # pixels
_STEPS = 12  # of a grammar
_MAX_REQUESTS = 10_000  # until a library's cache is made anew: it keeps no more words than 10,000
_MAX_MODEL_LEN = 1024

Request = Coroutine[Any, Any, None]


class Content:
    """Random texts and values that follow from a number."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)

    def word(self, num_letters: int = 12) -> str:
        return "".join(self._random.choices(string.ascii_lowercase, k=num_letters))

    def words(self) -> str:
        return " ".join(self.word(_LONG_WORD) for _ in range(_NUM_WORDS))

    def names(self) -> list[str]:
        return [self.word() for _ in range(_NUM_NAMES)]

    def token_ids(self, count: int) -> list[int]:
        return [self._random.randrange(300, 40_000) for _ in range(count)]

    def png(self) -> bytes:
        from PIL import Image

        file = io.BytesIO()
        pixels = self._random.randbytes(3 * _IMAGE_SIZE * _IMAGE_SIZE)
        Image.frombytes("RGB", (_IMAGE_SIZE, _IMAGE_SIZE), pixels).save(file, "PNG")
        return file.getvalue()

    def schema(self) -> dict[str, Any]:
        """Return a schema as engines get it, which forces a long word: the grammar's library encodes that."""
        return {
            "type": "object",
            "properties": {"value": {"const": self.word(_LONG_WORD)}},
            "required": ["value"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


class _Salts:
    """Askers by the names of tenants, with salts as a gateway makes them."""

    def __init__(self) -> None:
        self._tenants = Tenants(bytes(range(32)))

    def asker(self, name: str) -> Asker:
        tenant = self._tenants.named(name)
        return Asker(TenantName(name), tenant.cache_salt)


class GatewayRequests:
    """Requests to the renderer of a gateway."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._tokenizer_of_vllm = renderer._vllm.online.renderer.get_tokenizer()
        self._salts = _Salts()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, folder: Path) -> AsyncIterator[GatewayRequests]:
        """Start a renderer with its processes, and wait until they work."""
        config = ClusterConfig(model=ModelConfig(path=str(folder)))
        renderer = await asyncio.to_thread(build_renderer, config, str(folder))
        requests = cls(renderer)
        try:
            renderer.start()
            for ask in (requests.grammar, requests.image):
                while True:
                    with contextlib.suppress(NotReady):
                        await ask("others", 0)
                        break
                    await asyncio.sleep(0.5)
            yield requests
        finally:
            await renderer.close()

    def parameters(self, tenant: str, number: int) -> Request:
        return self._ask(tenant, _chat("a question", stop=[Content(number).word()]))

    def words(self, tenant: str, number: int) -> Request:
        return self._ask(tenant, _chat(Content(number).words()))

    def words_by_vllm(self, tenant: str, number: int) -> Request:
        # Alone: the rest of a chat that vLLM renders takes ten times as long, and hops between threads.
        return self._encode(Content(number).words())

    async def _encode(self, text: str) -> None:
        self._tokenizer_of_vllm.encode(text)

    def template_arguments(self, tenant: str, number: int) -> Request:
        return self._ask(tenant, _chat("a question", chat_template_kwargs=dict.fromkeys(Content(number).names(), 1)))

    def grammar(self, tenant: str, number: int) -> Request:
        schema = {"name": "n", "schema": Content(number).schema()}
        return self._ask(tenant, _chat("a question", response_format={"type": "json_schema", "json_schema": schema}))

    def image(self, tenant: str, number: int) -> Request:
        where = "messages[0].content[1]"
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
        return self._ask(tenant, body, ChatImage(Content(number).png(), where))

    async def _ask(self, tenant: str, body: dict[str, Any], *images: ChatImage) -> None:
        await self._renderer.render_chat(body, images, asker=self._salts.asker(tenant))

    async def prompt_with_image(self) -> tuple[list[int], PromptImage]:
        """Return the token ids and the image of a prompt."""
        parts = [{"type": "image_url"}]
        image = ChatImage(Content(1).png(), "messages[0].content[0]")
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
        prompt = await self._renderer.render_chat(body, [image])
        return list(prompt.token_ids), prompt.images[0]


class LibraryCalls:
    """The libraries below a renderer, with the caches that they come with. Make it before a renderer."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer
        from transformers import PythonBackend
        from vllm.utils import func_utils

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._num_requests = 0
        self._supports, self._function = func_utils._supports_kw, PythonBackend.apply_chat_template

    async def _encode(self, text: str) -> None:
        self._tokenizer.encode(text)

    def words(self, tenant: str, number: int) -> Request:
        self._num_requests += 1
        if self._num_requests % _MAX_REQUESTS == 0:
            self._tokenizer.model._clear_cache()
        return self._encode(Content(number).words())

    async def _look_up(self, names: list[str]) -> None:
        for name in names:
            self._supports(self._function, name, allow_var_kwargs=False)

    def template_arguments(self, tenant: str, number: int) -> Request:
        return self._look_up(Content(number).names())


class GrammarSteps:
    """Grammars as vLLM's backend makes them in an engine: with its tokenizer as it comes, and as engines have it."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import ModelConfig as VllmModelConfig
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend

        from kvferry.engine.vllm.plugins.grammars import fill_word_caches_of_grammars
        from kvferry.engine.vllm.rendering.structured_outputs import structured_outputs_config

        model = VllmModelConfig(model=str(folder), tokenizer=str(folder))
        config = SimpleNamespace(structured_outputs_config=structured_outputs_config(), model_config=model)

        tokenizer, vocab_size = cached_tokenizer_from_config(model), model.get_vocab_size()
        fill_word_caches_of_grammars()
        self._ours = GuidanceBackend(config, tokenizer=tokenizer, vocab_size=vocab_size)
        self._of_library = GuidanceBackend(config, tokenizer=tokenizer, vocab_size=vocab_size)
        as_it_comes = inspect.unwrap(GuidanceBackend._build_ll_tokenizer)
        self._make_tokenizer = lambda: as_it_comes(tokenizer, vocab_size)
        self._num_requests = 0
        self._bitmask = self._ours.allocate_token_bitmask(1)

    def ours(self, tenant: str, number: int) -> Request:
        return self._follow(self._ours, number)

    def of_library(self, tenant: str, number: int) -> Request:
        if self._num_requests % _MAX_REQUESTS == 0:
            self._of_library.ll_tokenizer = self._make_tokenizer()
        self._num_requests += 1
        return self._follow(self._of_library, number)

    def _follow(self, backend: Any, number: int) -> Request:
        return self._follow_schema(backend, json.dumps(Content(number).schema()))

    async def _follow_schema(self, backend: Any, schema: str) -> None:
        import numpy as np
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions

        grammar = backend.compile_grammar(StructuredOutputOptions.JSON, schema)
        for _ in range(_STEPS):
            grammar.fill_bitmask(self._bitmask, 0)
            allowed = np.unpackbits(self._bitmask.numpy().view(np.uint8)[0], bitorder="little")
            grammar.accept_tokens("r", [int(allowed.argmax())])


class IdentityRequests:
    """Tokens and tenants of a gateway."""

    def __init__(self, folder: Path) -> None:
        import jwt
        from cryptography.hazmat.primitives.asymmetric import rsa

        self._key = rsa.generate_private_key(65537, 2048)
        values = jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        keys = folder / "jwks.json"
        keys.write_text(json.dumps({"keys": [{**values, "kid": "k"}]}), encoding="utf-8")
        self._config = JwtConfig(
            issuer="https://issuer.example", audience="kvferry", jwks_file=keys, algorithms=["RS256"]
        )
        self._tokens = JwtTokens(self._config)
        self._tenants = Tenants(bytes(range(32)))
        self._ends_s = int(time.time()) + 24 * 3600

    def token(self, tenant: str, number: int) -> Request:
        return self._verify(self._signed(number))

    def forged_token(self, tenant: str, number: int) -> Request:
        """Another tenant has no token of the first one: it may guess what such a token says, and not its signature."""
        token = self._signed(number)
        if tenant == "other":
            signed, _, signature = token.rpartition(".")
            token = f"{signed}.{signature[::-1]}"
        return self._verify(token)

    def _signed(self, number: int) -> str:
        import jwt

        claims = {
            "iss": self._config.issuer,
            "aud": self._config.audience,
            "exp": self._ends_s,
            self._config.tenant_claim: Content(number).word(),
        }
        return jwt.encode(claims, self._key, "RS256", headers={"kid": "k"})

    async def _verify(self, token: str) -> None:
        with contextlib.suppress(Unauthenticated):
            self._tokens.tenant_of(token)

    async def tenant(self, tenant: str, number: int) -> None:
        self._tenants.named(tenant, 0, Content(number).word())


class EngineRequests:
    """Requests to a prefill engine of vLLM."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tokenizer = engine._llm.input_processor.tokenizer
        self._salts = _Salts()
        self._num_requests = 0
        self._with_image: tuple[list[int], PromptImage] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, folder: Path) -> AsyncIterator[EngineRequests]:
        from kvferry.engine.vllm.engine import VllmEngine

        model = model_config(path=str(folder), max_model_len=_MAX_MODEL_LEN)
        engine = VllmEngine(str(folder), model, engine_config("prefill"), producer=True)
        try:
            await engine.start()
            yield cls(engine)
        finally:
            await engine.stop()

    async def take_image(self, gateway: GatewayRequests) -> None:
        self._with_image = await gateway.prompt_with_image()

    def prefix(self, tenant: str, number: int) -> Request:
        return self._ask(tenant, Content(number).token_ids(_MAX_MODEL_LEN - 16))

    def image(self, tenant: str, number: int) -> Request:
        """Ask about an image under the digest of the number, after other tokens each time."""
        assert self._with_image is not None
        token_ids, image = self._with_image
        self._num_requests += 1
        before = Content(self._num_requests).token_ids(32)
        image = PromptImage(Content(number).word(64), image.offset + len(before), image.num_tokens, image.features)
        return self._ask(tenant, before + token_ids, images=(image,))

    def grammar(self, tenant: str, number: int) -> Request:
        sampling = Sampling(
            max_tokens=_STEPS, temperature=0.0, structured_outputs=json.dumps({"json": Content(number).schema()})
        )
        return self._ask(tenant, [1, 2, 3], sampling)

    def bad_words(self, tenant: str, number: int) -> Request:
        # Alone: an answer takes a hundred times as long.
        return self._encode_bad_words(Content(number).words().split())

    async def _encode_bad_words(self, words: list[str]) -> None:
        from vllm.sampling_params import SamplingParams

        SamplingParams(bad_words=words).update_from_tokenizer(self._tokenizer)

    async def _ask(
        self,
        tenant: str,
        token_ids: list[int],
        sampling: Sampling = Sampling(max_tokens=1, temperature=0.0),  # noqa: B008 - frozen
        images: tuple[PromptImage, ...] = (),
    ) -> None:
        self._num_requests += 1
        request = EngineRequest(
            RequestId(f"r{self._num_requests}"),
            token_ids,
            sampling,
            cache_salt=self._salts.asker(tenant).salt,
            images=tuple(image.span for image in images),
            features=[image.features for image in images],
        )
        await answer(self._engine, request)
