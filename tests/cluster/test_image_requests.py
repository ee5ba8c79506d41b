"""Chats with images over HTTP, up to the renderer: which are accepted, what they hold, and what is left of them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kvferry.config import ClusterConfig
from kvferry.engine.base import ANYBODY, Asker, ChatImage, RenderedPrompt
from kvferry_sim import SimRenderer
from support.beside import answered, beside
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import bearer
from .test_shares import knows_limit
from .test_tenants import admin_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(2000)
MIB = 1 << 20


class ImageRenderer(SimRenderer):
    """Takes images, and renders texts alone, once it may."""

    def __init__(self) -> None:
        super().__init__(8192)
        self.seen: list[tuple[Mapping[str, Any], list[ChatImage], str]] = []
        self.may_render = asyncio.Event()
        self.may_render.set()

    @property
    def takes_images(self) -> bool:
        return True

    async def render_chat(
        self, body: Mapping[str, Any], images: Sequence[ChatImage] = (), *, asker: Asker = ANYBODY
    ) -> RenderedPrompt:
        self.seen.append((body, list(images), asker.salt))
        await self.may_render.wait()
        return await super().render_chat({**body, "messages": [{"role": "user", "content": "x"}]})


@asynccontextmanager
async def with_images(
    *,
    models: Sequence[Mapping[str, Any]] = (),
    canary: Mapping[str, float] | None = None,
    tenants_in_etcd: bool = False,
    **images: Any,
) -> AsyncIterator[tuple[SimCluster, ImageRenderer, httpx.AsyncClient]]:
    model = {"path": MODEL, "canary": canary or {}}
    async with running(
        1, 1, gateway={"images": images, "tenants_in_etcd": tenants_in_etcd}, models=models, model=model
    ) as cluster:
        renderer = ImageRenderer()

        def make(_: ClusterConfig, __: str) -> ImageRenderer:
            return renderer

        gateway = await cluster.add_gateway(make)
        await until(lambda: gateway.readiness().ready)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            yield cluster, renderer, http


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def body_of(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, **more}


async def post(http: httpx.AsyncClient, *parts: dict[str, Any], **more: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=body_of(*parts, **more))


async def test_renderers_get_files_and_a_body_without_them() -> None:
    async with with_images() as (cluster, renderer, http):
        text = {"type": "text", "text": "What?"}
        assert (await post(http, text, image(url_of(PNG)), cache_salt="mine")).status_code == 200
        assert (await post(http, image(url_of(PNG)))).status_code == 200
        (body, images, salt), (_, _, other_salt) = renderer.seen
        assert body["messages"] == [{"role": "user", "content": [text, {"type": "image_url"}]}]
        assert images == [ChatImage(PNG, "messages[0].content[1]")]
        assert salt != other_salt
        assert cluster.gateway is not None
        assert cluster.gateway.admission.image_bytes.num_taken == 0


async def test_refused_images_and_texts_count_against_a_tenants_requests() -> None:
    async with with_images(tenants_in_etcd=True) as (cluster, renderer, http):
        admin, gateway = admin_of(cluster), cluster.gateway
        assert gateway is not None
        names = ("acme", "beta", "gamma")
        for name in names:
            await admin.create(name)
            await admin.set_limits(name, {"requests_per_minute": 6.0})  # a burst of one
        acme, beta, gamma = [bearer(await admin.add_key(name, "ci")) for name in names]
        await until(lambda: all(knows_limit(gateway, name) for name in names))

        async def send(key: dict[str, str], *parts: dict[str, Any], **more: Any) -> httpx.Response:
            return await http.post("/v1/chat/completions", json=body_of(*parts, **more), headers=key)

        assert (await send(acme, image(url_of(b"no image")))).status_code == 400
        refused = await send(acme, image(url_of(PNG)))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "tenant_limited"
        assert "requests_per_minute is 6" in refused.json()["error"]["message"]
        assert not renderer.seen, "before an image costs anything"
        text = {"type": "text", "text": "x"}
        assert (await send(beta, text, max_tokens=10**6)).status_code == 400
        assert (await send(beta, text)).status_code == 429
        assert (await send(gamma, image(url_of(PNG)))).status_code == 200
        assert (await send(gamma, text)).status_code == 429, "one with images counts once"
        limits = gateway.identification.limits
        assert limits is not None
        assert [limits._by_tenant[name].num_choices for name in names] == [0, 0, 0]


async def test_a_model_that_takes_none_says_so() -> None:
    async with running(1, 1) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await post(http, {"type": "text", "text": "x"}, image("http://169.254.169.254/"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "messages[0].content[1]: this model takes no images"
    assert error["param"] == "messages[0].content[1]"


async def test_entries_of_models_take_none() -> None:
    """They are tested with the default model alone."""
    async with with_images(models=[{"name": "alpha"}]) as (_, renderer, http):
        answer = await post(http, image(url_of(PNG)), model="alpha")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "messages[0].content[0]: this model takes no images"
        assert not renderer.seen


async def test_a_share_for_an_entry_of_models_leaves_chats_with_images_to_the_model() -> None:
    async with with_images(models=[{"name": "alpha"}], canary={"alpha": 100}) as (_, renderer, http):
        answer = await post(http, image(url_of(PNG)))
        assert answer.status_code == 200, answer.text
        assert len(renderer.seen) == 1
        assert (await post(http, {"type": "text", "text": "x"})).status_code == 200
        metrics = (await http.get("/metrics")).text
        for model in ("default", "alpha"):
            assert f'kvferry_model_requests_total{{asked="default",model="{model}",outcome="ok"}} 1.0' in metrics


async def test_images_in_flight_are_limited_and_given_back_with_their_requests() -> None:
    async with with_images(max_pending_mib=1) as (cluster, renderer, http):
        assert cluster.gateway is not None
        admission = cluster.gateway.admission
        renderer.may_render.clear()
        large = image(url_of(PNG.ljust(600 << 10, b"\0")))
        async with beside(answered(post(http, large))) as (held,):
            await until(lambda: len(renderer.seen) == 1)
            assert admission.image_bytes.num_taken == 600 << 10
            assert f"kvferry_image_bytes_in_flight {600 << 10}.0" in (await http.get("/metrics")).text
            refused = await post(http, large)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert "gateway.images.max_pending_mib allows 1048576" in refused.json()["error"]["message"]
            # A client that leaves gives its place back.
            async with beside(answered(post(http, image(url_of(PNG))))):
                await until(lambda: len(renderer.seen) == 2)
            await until(lambda: admission.image_bytes.num_taken == 600 << 10)
            renderer.may_render.set()
            await held
        await until(lambda: admission.image_bytes.num_taken == 0)
        assert (await post(http, large)).status_code == 200


async def test_a_request_that_never_fits_is_refused_for_good() -> None:
    async with with_images(max_pending_mib=1, max_bytes=2 * MIB) as (_, renderer, http):
        answer = await post(http, image(url_of(PNG.ljust(MIB + 1, b"\0"))))
        assert answer.status_code == 400
        assert "gateway.images.max_pending_mib allows 1048576" in answer.json()["error"]["message"]
        assert not renderer.seen


@pytest.mark.parametrize("num", [4096, 10_000])
async def test_thousands_of_images_are_refused_by_their_number(num: int) -> None:
    async with with_images() as (_, renderer, http):
        answer = await post(http, *[image("data:image/png;base64,QUJD")] * num)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert f"{num} " in error["message"]
        assert "are too many" in error["message"]
        assert not renderer.seen


async def test_an_image_larger_than_a_body_is_a_body_that_is_too_large() -> None:
    async with with_images() as (_, renderer, http):
        answer = await post(http, image(url_of(bytes(7 * MIB))))
        assert answer.status_code == 413
        assert not renderer.seen


async def test_hosts_that_are_not_allowed_are_not_asked() -> None:
    async with with_images(allowed_hosts=["images.example"]) as (_, renderer, http):
        for url in ("http://169.254.169.254/", "http://localhost:8265/", "https://images.example.evil.example/a.png"):
            answer = await post(http, image(url))
            assert answer.status_code == 400, url
            error = answer.json()["error"]
            assert "are not allowed here; gateway.images.allowed_hosts has the hosts" in error["message"]
            assert error["param"] == "messages[0].content[0]"
        assert not renderer.seen


async def test_images_of_allowed_hosts_are_fetched() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(PNG) + PNG)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        async with with_images(allowed_hosts=[f"127.0.0.1:{port}"]) as (_, renderer, http):
            answer = await post(http, image(f"http://127.0.0.1:{port}/a.png"))
            assert "private, loopback or link-local" in answer.json()["error"]["message"]
        async with with_images(allowed_hosts=[f"127.0.0.1:{port}"], allow_private_addresses=True) as (
            _,
            renderer,
            http,
        ):
            assert (await post(http, image(f"http://127.0.0.1:{port}/a.png"))).status_code == 200
            assert renderer.seen[0][1] == [ChatImage(PNG, "messages[0].content[0]")]
