"""engine/vllm/rendering/image_process.py: chats with images as vLLM renders them, and images that are no images."""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
import io
import json
import shutil
import struct
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio

from bench.tiny_models import IMAGE_TOKEN, make_image_model
from kvferry import config as configuration
from kvferry import model_folder
from kvferry.config import ModelConfig
from kvferry.engine.base import ANYBODY, CacheSalt, ChatImage, RenderedPrompt
from kvferry.engine.image_chats import AskedImage, ImageChat, ImageChats, RefusedChat
from kvferry.engine.vllm.rendering.renderer import VllmRenderer
from kvferry.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from kvferry.gateway.lifecycle import build_renderer
from support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("without_wall_limits"),
]


from PIL import Image  # noqa: E402  of vLLM's dependencies

MAX_PIXELS = 1 << 20
REFUSED = "refuse me"  # by the chat template
CONFIG: Mapping[str, Any] = {
    "model": {"tool_parser": "hermes"},
    "gateway": {"images": {"processes": 1, "max_pixels": MAX_PIXELS, "max_per_request": 64, "memory_mib": 512}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_image_model("idefics3", tmp_path_factory.mktemp("idefics3")))


@pytest.fixture(scope="module")
def template(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file with the model's own template, which also refuses what has REFUSED."""
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    refusal = f"{{% if '{REFUSED}' in messages|string %}}{{{{ raise_exception('no answers today') }}}}{{% endif %}}"
    file.write_text(refusal + Path(folder, "chat_template.jinja").read_text())
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer(folder: str, template: Path, without_wall_limits: None) -> AsyncIterator[VllmRenderer]:
    config = configuration.parse({**CONFIG, "model": {**CONFIG["model"], "chat_template": str(template)}})
    made = await asyncio.to_thread(build_renderer, config, folder)
    assert isinstance(made, VllmRenderer)
    assert made.takes_images
    made.start()
    yield made
    await made.close()


@pytest.fixture
def chats(renderer: VllmRenderer) -> ImageChats:
    assert renderer._images is not None
    return renderer._images


def picture(seed: int, size: tuple[int, int] = (100, 80), mode: str = "RGB") -> Image.Image:
    shape = (size[1], size[0], 4)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


async def render(renderer: VllmRenderer, *files: bytes, salt: str = "", **fields: Any) -> RenderedPrompt:
    parts = [
        {"type": "text", "text": "What is"},
        *({"type": "image_url"} for _ in files),
        {"type": "text", "text": "?"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, **fields}
    images = [ChatImage(file, f"messages[0].content[{i + 1}]") for i, file in enumerate(files)]
    return await renderer.render_chat(body, images, asker=ANYBODY._replace(salt=CacheSalt(salt)))


async def by_vllm(renderer: VllmRenderer, *files: bytes) -> tuple[list[int], list[tuple[int, int]], list[Any]]:
    """Render as plain vLLM does, with data URLs, in this process: token ids, places, and the processor's tensors."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    parts = [
        {"type": "text", "text": "What is"},
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        {"type": "text", "text": "?"},
    ]
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": parts}]})
    _, (rendered,) = await renderer._loop.run(renderer._vllm.online.render_chat(request, skip_mm_cache=True))
    places = [(place.offset, place.length) for place in rendered["mm_placeholders"]["image"]]
    return list(rendered["prompt_token_ids"]), places, list(rendered["mm_kwargs"]["image"])


def as_arrays(item: Any) -> dict[str, Any]:
    return {name: np.asarray(elem.data) for name, elem in item.items()}


FORMATS = {
    "png": file_of(picture(1)),
    "large png": file_of(picture(2, (700, 300))),
    "narrow png": file_of(picture(3, (3, 1200))),
    "one pixel": file_of(picture(4, (1, 1))),
    "rgba png": file_of(picture(5, mode="RGBA")),
    "palette png": file_of(picture(6, mode="P")),
    "grey png": file_of(picture(7, mode="L")),
    "16 bit png": file_of(picture(7, mode="I;16")),
    "jpeg": file_of(picture(8), "JPEG"),
    "cmyk jpeg": file_of(picture(9, mode="CMYK"), "JPEG"),
    "turned jpeg": file_of(
        picture(10, (90, 40)), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
    ),
    "webp": file_of(picture(11), "WEBP"),
    "animated webp": file_of(picture(12), "WEBP", save_all=True, append_images=[picture(13)]),
    "gif": file_of(picture(14), "GIF"),
    "animated gif": file_of(picture(15), "GIF", save_all=True, append_images=[picture(16)]),
}


@pytest.mark.parametrize("name", FORMATS)
async def test_tokens_places_and_features_are_vllms(renderer: VllmRenderer, name: str) -> None:
    from kvferry.engine.vllm.rendering.image_features import decode_features

    files = (FORMATS[name], FORMATS["png"])
    token_ids, places, items = await by_vllm(renderer, *files)
    for _ in range(2):  # prepared now, and before
        prompt = await render(renderer, *files)
        assert list(prompt.token_ids) == token_ids
        assert [(image.offset, image.num_tokens) for image in prompt.images] == places
        for image, item in zip(prompt.images, items, strict=True):
            got, wanted = as_arrays(decode_features(image.features)), as_arrays(item)
            assert got.keys() == wanted.keys()
            for key, tensor in wanted.items():
                np.testing.assert_array_equal(got[key], tensor)


async def test_a_known_image_is_not_decoded_again(renderer: VllmRenderer, chats: ImageChats) -> None:
    file = file_of(picture(20))
    first = await render(renderer, file, salt="a")
    kept = chats._kept[("a", first.images[0].digest)]
    # A file that cannot be decoded has the digest of one that was: what is kept takes its place.
    broken = file[:-50]
    chats._keep("a", chats.digest_of(broken), kept)
    again = await render(renderer, broken, salt="a")
    assert again.images[0].features == first.images[0].features
    assert again.token_ids == first.token_ids
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        await render(renderer, broken, salt="b")


async def test_digests_are_of_the_file(renderer: VllmRenderer) -> None:
    one = await render(renderer, FORMATS["png"], FORMATS["png"])
    same, other = await render(renderer, FORMATS["png"]), await render(renderer, FORMATS["jpeg"])
    assert one.images[0].digest == one.images[1].digest == same.images[0].digest != other.images[0].digest


async def test_placeholders_count_as_tokens_of_the_prompt(renderer: VllmRenderer) -> None:
    prompt = await render(renderer, FORMATS["png"])
    assert len(prompt.token_ids) > prompt.images[0].num_tokens > 16
    with pytest.raises(ContextLengthExceeded, match="4096"):
        await render(renderer, *[FORMATS["png"]] * 60)
    room = renderer.max_model_len() - len(prompt.token_ids)
    assert (await render(renderer, FORMATS["png"], max_tokens=room)).sampling.max_tokens == room
    with pytest.raises(ContextLengthExceeded):
        await render(renderer, FORMATS["png"], max_tokens=room + 1)


@pytest.mark.parametrize("is_before", [True, False])
async def test_a_text_with_a_placeholder_takes_no_images_place(renderer: VllmRenderer, is_before: bool) -> None:
    texts = [{"type": "text", "text": text} for text in (f"{IMAGE_TOKEN} and", "?")]
    parts = [{"type": "image_url"}, {"type": "image_url"}]
    content = [texts[0], *parts, texts[1]] if is_before else [*parts, texts[0], texts[1]]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
    images = [ChatImage(FORMATS[name], "messages[0].content[1]") for name in ("png", "jpeg")]
    for _ in range(2):  # prepared now, and before
        with pytest.raises(InvalidRequest, match=f"no text may have '{IMAGE_TOKEN}'"):
            await renderer.render_chat(body, images)
        assert (await render(renderer, *(image.data for image in images))).images
    # Without an image it is text.
    body = {"messages": [{"role": "user", "content": f"{IMAGE_TOKEN} and"}], "max_tokens": 8}
    assert not (await renderer.render_chat(body)).images


async def test_sampling_and_grammars_are_those_of_a_chat(renderer: VllmRenderer) -> None:
    prompt = await render(
        renderer, FORMATS["png"], temperature=0.5, seed=3, logprobs=True, top_logprobs=2, response_format={
            "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}
        },
    )  # fmt: skip
    sampling = prompt.sampling
    assert (sampling.temperature, sampling.seed, sampling.logprobs, sampling.max_tokens) == (0.5, 3, 2, 8)
    assert "object" in sampling.structured_outputs
    with pytest.raises(InvalidRequest, match="response_format"):
        await render(renderer, FORMATS["png"], response_format={
            "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}}
        })  # fmt: skip


async def test_no_grammar_beside_an_image_is_compiled_by_the_image_process(renderer: VllmRenderer) -> None:
    """xgrammar would end its fork, whose end is told as a fault of the image."""
    links = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(10_000)}
    chain = {"$defs": {**links, "d10000": {"type": "string"}}, "$ref": "#/$defs/d0"}
    tag = {"structures": [{"begin": "<a>", "schema": chain, "end": "</a>"}], "triggers": ["<a>"]}
    with pytest.raises(InvalidRequest, match=r"^response_format: its grammar .* nests too deeply"):
        await render(renderer, FORMATS["png"], response_format={"type": "structural_tag", **tag})


async def test_tools_beside_images_are_parsed_as_beside_texts(renderer: VllmRenderer) -> None:
    function = {"name": "weather", "description": "of a place", "parameters": {"type": "object", "properties": {}}}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    prompt = await render(renderer, FORMATS["png"], **tools)
    text = await renderer.render_chat({"messages": [{"role": "user", "content": "What?"}], "max_tokens": 8, **tools})
    assert prompt.parse == text.parse is not None
    assert (await render(renderer, FORMATS["png"])).parse is None


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bomb(kind: bytes, num_mib: int = 1024) -> bytes:
    """Return a small picture with a chunk that grows to `num_mib`."""
    file = png_of(1, 1, zlib.compress(b"\0\0\0\0"))
    packer = zlib.compressobj(9)
    head, part = packer.compress(b""), packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    # A part refers to nothing before it, so that one compressed part repeats. Adler-32 of zeros is their number and 1.
    checksum = struct.pack(">HH", (num_mib << 20) % 65521, 1)
    content = b"a\0\0" + head + part * num_mib + packer.flush()[:-4] + checksum
    body = kind + content
    return file[:33] + struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body)) + file[33:]


async def test_a_bomb_grows_to_what_it_says() -> None:
    text = bomb(b"zTXt", 3)[41:].removeprefix(b"a\0\0")
    assert zlib.decompressobj().decompress(text) == bytes(3 << 20)


HOSTILE: Mapping[str, tuple[bytes | Callable[[], bytes], str]] = {
    "most pixels and one": (png_of(MAX_PIXELS + 1, 1), f"gateway.images.max_pixels is {MAX_PIXELS}"),
    "a wide bomb": (png_of(2**31 - 1, 2**31 - 1), "pixels are too many"),
    "a gif bomb": (FORMATS["gif"][:6] + b"\xff" * 4 + FORMATS["gif"][10:], "65535 x 65535 pixels"),
    "a webp bomb": (b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff" * 6 + bytes(8), "messages[0].content[1]: "),
    "no pixels": (png_of(0, 5), "messages[0].content[1]: "),
    "truncated png": (FORMATS["png"][:-100], "the image cannot be decoded: image file is truncated"),
    "truncated jpeg": (FORMATS["jpeg"][:-100], "the image cannot be decoded: image file is truncated"),
    "truncated webp": (FORMATS["webp"][:-100], "messages[0].content[1]: "),
    "truncated gif": (FORMATS["gif"][: len(FORMATS["gif"]) // 2], "messages[0].content[1]: "),
    "only a signature": (b"\x89PNG\r\n\x1a\n", "messages[0].content[1]: "),
    "noise after a signature": (b"\xff\xd8\xff" + bytes(range(256)) * 40, "messages[0].content[1]: "),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "expected PNG, JPEG, WebP or GIF"),
    "tiff": (file_of(picture(17), "TIFF"), "expected PNG, JPEG, WebP or GIF"),
    "bmp": (file_of(picture(18), "BMP"), "expected PNG, JPEG, WebP or GIF"),
    "empty": (b"", "expected PNG, JPEG, WebP or GIF"),
    "a bomb of text": (functools.partial(bomb, b"zTXt"), "messages[0].content[1]: "),
    "a bomb of colours": (functools.partial(bomb, b"iCCP"), "messages[0].content[1]: "),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_files_cost_their_request_alone(renderer: VllmRenderer, chats: ImageChats, name: str) -> None:
    made, reason = HOSTILE[name]
    file = made if isinstance(made, bytes) else made()
    await render(renderer, FORMATS["png"])
    pid = chats._process.pid
    with pytest.raises(InvalidRequest) as refused:
        await render(renderer, file)
    assert reason in refused.value.message
    assert refused.value.param == "messages[0].content[1]"
    assert (await render(renderer, FORMATS["png"])).images
    assert chats._process.pid == pid
    assert not psutil.Process(pid).children()


def of_failing_processor(cause: Exception) -> Any:
    """Return an ImagePrompts whose processor raises `cause`, as vLLM tells it."""
    from kvferry.engine.image_chats import ImageSettings
    from kvferry.engine.vllm.rendering.image_process import ImagePrompts

    async def chat(_: Any) -> None:
        try:
            raise ValueError("Failed to apply P on data={'images': [<PIL.Image.Image at 0x7FD2>]}") from cause
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    renderer = SimpleNamespace(_mm_processor_only_cache=None)
    prompts = SimpleNamespace(serving=SimpleNamespace(), online=SimpleNamespace(renderer=renderer), chat=chat)
    return ImagePrompts(prompts, ImageSettings(MAX_PIXELS, 1 << 20))  # type: ignore[arg-type]


def chat_of(num_images: int) -> bytes:
    content = [{"type": "image_url"}] * num_images
    images = tuple(AskedImage(str(i), f"messages[0].content[{i}]", FORMATS["png"], None) for i in range(num_images))
    return msgspec.msgpack.encode(
        ImageChat(json.dumps({"messages": [{"role": "user", "content": content}]}).encode(), images)
    )


@pytest.mark.parametrize(
    ("num_images", "where", "named"),
    [
        (1, "messages[0].content[0]", "this image: messages[0].content[0] of 100 x 80 pixels"),
        (6, "messages", "messages[0].content[3] of 100 x 80 pixels and 2 more"),
    ],
)
async def test_what_a_processor_raises_names_the_image_and_no_object_in_memory(
    num_images: int, where: str, named: str
) -> None:
    from vllm.multimodal.processing.context import InputProcessingContext

    failing = of_failing_processor(ZeroDivisionError())
    refused = await asyncio.to_thread(failing.render, chat_of(num_images))  # runs a loop of its own
    told = msgspec.msgpack.decode(refused, type=RefusedChat)
    assert told.message.startswith("the model's image processor does not take ")
    assert told.message.endswith(named)
    assert told.param == where
    assert 'f"Failed to apply {' in inspect.getsource(InputProcessingContext.call_hf_processor)


async def test_a_processor_short_of_memory_is_no_fault_of_the_image() -> None:
    with pytest.raises(MemoryError):
        await asyncio.to_thread(of_failing_processor(MemoryError()).render, chat_of(1))


async def test_an_image_of_the_most_pixels_is_taken(renderer: VllmRenderer) -> None:
    assert (await render(renderer, file_of(Image.new("RGB", (1024, 1024), "red")))).images


async def test_a_folder_without_an_image_processor_is_refused_when_the_gateway_starts(
    folder: str, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"model: its image processor cannot be made: .*max_per_request 0"):
        await asyncio.to_thread(build_renderer, configuration.parse(CONFIG), str(copy))
    texts = await asyncio.to_thread(VllmRenderer, str(copy), "m", ModelConfig())
    assert not texts.takes_images
    await texts.close()


@pytest.mark.parametrize("has_image", [False, True])
async def test_a_template_s_refusal_says_that_it_is_the_template_s(renderer: VllmRenderer, has_image: bool) -> None:
    images = [ChatImage(FORMATS["png"], "messages[0].content[1]")] if has_image else []
    content = [{"type": "text", "text": REFUSED}, *({"type": "image_url"} for _ in images)]
    with pytest.raises(InvalidRequest) as refused:
        await renderer.render_chat({"messages": [{"role": "user", "content": content}], "max_tokens": 8}, images)
    assert refused.value.message == "messages: the model's chat template refuses them: no answers today"
    assert refused.value.param == "messages"


async def test_a_gateway_does_not_start_with_a_template_that_refuses_all_and_names_its_file(
    folder: str, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[7].content.text }}")
    config = configuration.parse({**CONFIG, "model": {"chat_template": str(file)}})
    with pytest.raises(ConfigError, match=rf"^model\.chat_template: {file}: it refuses .*no element 7$"):
        await asyncio.to_thread(build_renderer, config, folder)


def overwrite(template: Path) -> None:
    """Replace the template for good: no process of these tests may read it again."""
    template.write_text("another one {{ messages }}")


async def test_texts_and_images_keep_the_template_that_the_gateway_read(
    renderer: VllmRenderer, chats: ImageChats, template: Path
) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    before = await renderer.render_chat(dict(body)), await render(renderer, FORMATS["png"])
    pid = chats._process.pid
    assert pid is not None
    overwrite(template)
    psutil.Process(pid).kill()
    await until(lambda: chats._process._process.reading.done())  # type: ignore[union-attr]
    after = await renderer.render_chat(dict(body)), await render(renderer, FORMATS["png"])
    assert chats._process.pid not in (pid, None)
    for one, other in zip(before, after, strict=True):
        assert one.token_ids == other.token_ids


async def test_a_bad_image_among_good_ones_is_named(renderer: VllmRenderer) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await render(renderer, FORMATS["png"], FORMATS["png"][:-100], FORMATS["jpeg"])
    assert refused.value.param == "messages[0].content[2]"


async def test_texts_alone_are_rendered_without_the_image_process(renderer: VllmRenderer, chats: ImageChats) -> None:
    before = list(chats._kept)
    prompt = await renderer.render_chat({"messages": [{"role": "user", "content": "hi"}]})
    assert not prompt.images
    assert isinstance(prompt.token_ids, array)
    assert list(chats._kept) == before


async def test_a_text_model_takes_no_images() -> None:
    made = await asyncio.to_thread(VllmRenderer, str(model_folder.resolve("default")), "m", ModelConfig())
    assert not made.takes_images
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\]: this model takes no images"):
        await render(made, FORMATS["png"])
    await made.close()
