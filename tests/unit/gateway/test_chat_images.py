from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvferry.config import GatewayConfig, ImagesConfig
from kvferry.engine.base import PromptImage, RenderedPrompt, Sampling
from kvferry.errors import InvalidRequest, KvferryError, Overloaded, TenantLimited, TenantOverloaded
from kvferry.gateway.admission import Admission, Claim, Readiness
from kvferry.gateway.bodies.chat_images import ChatImages
from kvferry.gateway.bodies.openai_bodies import MAX_PARTS, chat_of, for_renderer
from kvferry.gateway.identity.tenant_requests import GatewayLimits, TenantRequests
from kvferry.gateway.metrics import GatewayMetrics
from kvferry.tenancy.limits import LimitName, Limits

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
FILES = {
    "png": PNG,
    "jpeg": b"\xff\xd8\xff\xe0" + bytes(100),
    "gif": b"GIF89a" + bytes(100),
    "old gif": b"GIF87a" + bytes(100),
    "webp": b"RIFF\x00\x00\x00\x00WEBP" + bytes(100),
}
WHERE = "messages[0].content[0]"


class Held:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fetches = (0, 0, 0)

    def hold_images(self, num_bytes: int) -> None:
        self.sizes.append(num_bytes)

    @contextlib.contextmanager
    def fetching(self, num_images: int, num_running: int, most: int) -> Iterator[None]:
        self.fetches = num_images, num_running, most
        yield


class Fetched:
    """A fetcher that has the files."""

    num_fetches = 3  # of others
    max_fetches = 16

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    async def fetch(self, urls: Sequence[tuple[str, str]]) -> list[bytes]:
        return [self.files[url] for url, _ in urls]


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def messages_of(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    body = chat_of({"model": "m", "messages": [{"role": "user", "content": list(parts)}]})
    messages: list[dict[str, Any]] = for_renderer(body)["messages"]
    return messages


async def load(
    *parts: dict[str, Any], fetcher: Fetched | None = None, takes_images: bool = True, **limits: Any
) -> list[bytes]:
    images = ChatImages(ImagesConfig.model_validate(limits), fetcher)
    return [image.data for image in await images.load(messages_of(*parts), Held(), takes_images=takes_images)]


async def refusal(*parts: dict[str, Any], **values: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        await load(*parts, **values)
    return refused.value


@pytest.mark.parametrize("name", FILES)
async def test_files_are_known_by_their_content_whatever_type_they_declare(name: str) -> None:
    assert await load(part(data_url(FILES[name], "image/x-unknown"))) == [FILES[name]]


@pytest.mark.parametrize("more", range(-3, 4))
async def test_files_are_whole_around_the_borders_of_pieces(more: int) -> None:
    data = PNG + os.urandom(3 * (32 << 10) * 2 - len(PNG) + more)
    assert await load(part(data_url(data))) == [data]


async def test_files_come_in_the_order_of_their_parts_and_urls_leave_the_body() -> None:
    url = "https://images.example/a.gif"
    text = {"type": "text", "text": "between"}
    messages = messages_of(part(data_url(PNG)), text, part(url, detail="low"), part(data_url(FILES["jpeg"])))
    held = Held()
    images = ChatImages(ImagesConfig(max_bytes=1024), Fetched({url: FILES["gif"]}))
    loaded = await images.load(messages, held, takes_images=True)
    assert [image.data for image in loaded] == [PNG, FILES["gif"], FILES["jpeg"]]
    assert [image.where for image in loaded] == [f"messages[0].content[{i}]" for i in (0, 2, 3)]
    assert messages[0]["content"] == [{"type": "image_url"}, text, {"type": "image_url"}, {"type": "image_url"}]
    # A file that is fetched may have the largest size until it is there.
    sizes = len(PNG) + len(FILES["jpeg"])
    assert held.sizes == [sizes + 1024, sizes + len(FILES["gif"])]
    assert held.fetches == (1, 3, 16)


async def test_a_chat_without_images_holds_nothing() -> None:
    held = Held()
    messages = messages_of({"type": "text", "text": "x"})
    assert await ChatImages(ImagesConfig(), None).load(messages, held, takes_images=False) == []
    assert not held.sizes


async def test_a_model_without_images_is_named_as_the_reason() -> None:
    refused = await refusal({"type": "text", "text": "x"}, part("file:///etc/passwd"), takes_images=False)
    assert refused.message == "messages[0].content[1]: this model takes no images"
    assert refused.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "this one's scheme is 'file'"),
        ("ftp://images.example/a.png", "'ftp'"),
        ("javascript:alert(1)", "'javascript'"),
        ("/a.png", "scheme is none"),
        ("", "scheme is none"),
        ("https://images.example/a.png", "gateway.images.allowed_hosts names no host"),
        ("HTTP://images.example/a.png", "gateway.images.allowed_hosts names no host"),
        ("data:image/png;base64", "expected a data URL"),
        ("data:image/png,abc", "expected a data URL"),
        ("data:,", "expected a data URL"),
        ("data:" + "image/png" * 1000 + ";base64,QUJD", "expected a data URL"),
        ("data:text/html;base64,QUJD", "'text/html;base64'"),
        ("data:;base64,QUJD", "expected an image"),
        ("data:video/mp4;base64,QUJD", "expected an image"),
        ("data:image/png;base64,QUJ", "not valid base64"),
        ("data:image/png;base64,QU JD", "not valid base64"),
        ("data:image/png;base64,QUJD\n", "not valid base64"),
        ("data:image/png;base64,%2B%2B%2B", "not valid base64"),
        ("data:image/png;base64,ééé=", "not valid base64"),
        ("data:image/png;base64,QUJD====QUJD", "not valid base64"),
        ("data:image/png;base64,QQ==QUJD", "not valid base64: padding before the end"),
        ("data:image/png;base64," + "QUJD" * (32 << 10) + "Q", "not valid base64"),
        ("data:image/png;base64," + "QUJD" * (32 << 10) + "====", "not valid base64"),
        ("data:image/png;base64,", "the file's content is none of PNG"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "the file's content is none of PNG"),
        (data_url(b"II*\x00" + bytes(100), "image/tiff"), "the file's content is none of PNG"),
        (data_url(b"RIFF\x00\x00\x00\x00WAVE", "image/webp"), "the file's content is none of PNG"),
        (data_url(b"%!PS-Adobe-3.0 EPSF", "image/png"), "the file's content is none of PNG"),
    ],
)
async def test_what_is_no_image_is_refused_with_its_place(url: str, reason: str) -> None:
    refused = await refusal(part(url))
    assert refused.param == WHERE
    assert refused.message.startswith(f"{WHERE}: ")
    assert reason in refused.message
    assert len(refused.message) < 300


@pytest.mark.parametrize("num_over", [0, 1])
@pytest.mark.parametrize("size", [1024, 1025, 1026])
async def test_an_images_bytes_are_limited(size: int, num_over: int) -> None:
    data = PNG.ljust(size, b"\x00")
    if not num_over:
        assert await load(part(data_url(data)), max_bytes=size) == [data]
        return
    refused = await refusal(part(data_url(data + b"\x00")), max_bytes=size)
    assert f"gateway.images.max_bytes is {size}" in refused.message
    assert refused.param == WHERE


async def test_images_of_a_request_are_limited() -> None:
    one = part(data_url(PNG))
    assert len(await load(one, one, max_per_request=2)) == 2
    refused = await refusal(one, one, one, max_per_request=2)
    assert refused.message == "messages: 3 images are too many; gateway.images.max_per_request is 2"
    assert "too many" in (await refusal(*[one] * MAX_PARTS)).message
    with pytest.raises(InvalidRequest, match="4097 parts are too many"):
        await load(*[one] * (MAX_PARTS + 1))
    assert "max_per_request is 0" in (await refusal(one, max_per_request=0)).message


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"type": "image_url"}, f"{WHERE}.image_url"),
        ({"type": "image_url", "image_url": "https://images.example/a.png"}, f"{WHERE}.image_url"),
        ({"type": "image_url", "image_url": {}}, f"{WHERE}.image_url.url"),
        (part(5), f"{WHERE}.image_url.url"),
        (part(None), f"{WHERE}.image_url.url"),
        (part("data:", detail="huge"), f"{WHERE}.image_url.detail"),
        (part("data:", headers={}), f"{WHERE}.image_url"),
        (part("data:") | {"uuid": "another image's"}, WHERE),
    ],
)
def test_parts_of_another_shape_are_refused_with_their_place(wrong: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        messages_of(wrong)
    assert refused.value.param == place
    assert refused.value.message.startswith(f"{place}: ")


@pytest.mark.parametrize("role", ["system", "developer", "assistant", "tool"])
def test_only_users_send_images(role: str) -> None:
    message = {"role": role, "content": [part(data_url(PNG))], "tool_call_id": "a"}
    with pytest.raises(InvalidRequest, match=rf"only messages of users have images, not of {role}"):
        chat_of({"model": "m", "messages": [message]})


@pytest.mark.parametrize("kind", ["input_image", "image", "image_embeds", "input_audio", "video_url", "file"])
def test_other_parts_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"expected 'text' or 'image_url', not '{kind}'"):
        messages_of({"type": kind, kind: {"url": data_url(PNG)}})


def test_a_text_part_is_no_way_to_an_image() -> None:
    sly = {"type": "text", "text": "x", "uuid": "a", "image_url": "http://169.254.169.254/", "image_embeds": "b"}
    assert messages_of(sly)[0]["content"] == [{"type": "text", "text": "x"}]


# What all requests of a gateway hold for images.

MIB = 1 << 20


def admission(*, has_tenants: bool = False) -> Admission:
    config = GatewayConfig.model_validate({"images": {"max_pending_mib": 4}})
    by_tenant = TenantRequests() if has_tenants else None
    return Admission(config, GatewayMetrics(), lambda: Readiness(True, (), ()), by_tenant=by_tenant)


def test_images_in_flight_are_limited_and_given_back() -> None:
    gateway = admission()
    with gateway.count_request("chat_completions") as one, gateway.count_request("chat_completions") as other:
        one.claim.hold_images(3 * MIB)
        other.claim.hold_images(1 * MIB)
        with pytest.raises(Overloaded, match=r"gateway\.images\.max_pending_mib allows 4194304") as refused:
            other.claim.hold_images(1 * MIB + 1)
        assert refused.value.retry_after_s == 1
        assert gateway.image_bytes.num_taken == 4 * MIB
        one.claim.hold_images(2 * MIB)
        other.claim.hold_images(2 * MIB)
        with pytest.raises(InvalidRequest, match="4194305 bytes of images of all choices are too many"):
            other.claim.hold_images(4 * MIB + 1)
    assert gateway.image_bytes.num_taken == 0


def test_prepared_images_count_once_for_each_choice() -> None:
    gateway = admission()
    image = PromptImage("a", 0, 4, bytes(MIB))
    prompt = RenderedPrompt([1] * 10, Sampling(max_tokens=1), images=(image,))
    with gateway.count_request("chat_completions") as one:
        one.claim.hold_images(100)
        one.claim.take_answer([prompt], 4)
        assert gateway.image_bytes.num_taken == 4 * MIB
    with gateway.count_request("chat_completions") as one, pytest.raises(InvalidRequest, match="of all choices"):
        one.claim.take_answer([prompt], 5)
    assert gateway.image_bytes.num_taken == 0


def test_a_tenant_leaves_room_for_images_of_others() -> None:
    gateway = admission(has_tenants=True)
    with gateway.count_request("chat_completions") as one, gateway.count_request("chat_completions") as other:
        gateway.note_tenant(one, "acme")
        gateway.note_tenant(other, "acme")
        one.claim.hold_images(2 * MIB)
        with pytest.raises(TenantOverloaded, match="bytes of images"):
            other.claim.hold_images(1)
    assert gateway.image_bytes.num_taken == 0


def limited(gateway: Admission, claim: Claim) -> GatewayLimits:
    """Give the gateway a tenant, the claim's, with a burst of one request."""
    gateway.by_tenant = TenantRequests()
    contract = Limits(requests_per_minute=6, tokens_per_minute=600)
    limits = gateway.limits = GatewayLimits({"acme": contract}.get, lambda: 0.0)
    claim.tenant = "acme"
    return limits


def test_a_chat_with_images_counts_once_and_its_prompt_when_it_is_rendered() -> None:
    gateway = admission()
    with gateway.count_request("chat_completions") as one:
        limits = limited(gateway, one.claim)
        one.claim.count(1)
        assert limits._by_tenant["acme"].num_choices == 1
        one.claim.take_answer([RenderedPrompt([1] * 90, Sampling(max_tokens=1))], 1)
        known = limits._by_tenant["acme"]
        assert {name: bucket._level for name, bucket in known._buckets.items()} == {
            LimitName.REQUESTS: 0.0,
            LimitName.TOKENS: 10.0,
        }
    assert known.num_choices == 0


def test_a_chat_with_images_whose_prompt_finds_no_room_is_given_back() -> None:
    gateway = admission()
    with gateway.count_request("chat_completions") as one:
        limits = limited(gateway, one.claim)
        one.claim.count(1)
        gateway.prompt_tokens.num_taken = gateway.prompt_tokens.most  # of others
        with pytest.raises(Overloaded) as refused:
            one.claim.take_answer([RenderedPrompt([1], Sampling(max_tokens=1))], 1)
        one.failed(refused.value)
        known = limits._by_tenant["acme"]
    assert known._buckets[LimitName.REQUESTS]._level == 1.0
    assert known.num_choices == 0


@pytest.mark.parametrize(
    ("error", "level"), [(InvalidRequest("a file that is no image"), 0.0), (Overloaded("64 chats wait"), 1.0)]
)
def test_refused_images_count_and_those_without_room_do_not(error: KvferryError, level: float) -> None:
    gateway = admission()
    with gateway.count_request("chat_completions") as one:
        limits = limited(gateway, one.claim)
        one.claim.count(1)
        one.failed(error)
        known = limits._by_tenant["acme"]
    assert known._buckets[LimitName.REQUESTS]._level == level
    assert known.num_choices == 0
    if not level:
        with gateway.count_request("chat_completions") as other:
            other.claim.tenant = "acme"
            with pytest.raises(TenantLimited):
                other.claim.count(1)
        assert known.num_choices == 0
