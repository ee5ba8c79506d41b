from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.engine import fork_process
from kvferry.engine.base import ANYBODY, CacheSalt, ChatImage, RenderedPrompt
from kvferry.engine.fork_process import ForkProcess
from kvferry.engine.forks import ForkLimits
from kvferry.engine.image_chats import MAX_WAITING, ImageChats, image_identity
from kvferry.errors import EngineError, InvalidRequest, NotReady, Overloaded
from support.waiting import PATIENCE_S, until

COMMAND = [sys.executable, "-m", "tests.support.image_process"]
LIMITS = ForkLimits(cpu_s=0.5, wall_s=PATIENCE_S, memory_bytes=256 << 20)
BODY = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}


def made(limits: ForkLimits = LIMITS, *, cache_bytes: int = 1 << 20, max_prepared_bytes: int = 1 << 20) -> ImageChats:
    return ImageChats(
        ForkProcess(COMMAND, limits, "images cannot be prepared now"),
        b"identity",
        num_processes=2,
        max_prepared_bytes=max_prepared_bytes,
        cache_bytes=cache_bytes,
    )


@pytest.fixture
async def chats(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ImageChats]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    monkeypatch.setattr(fork_process, "_SLOW_START_S", PATIENCE_S)
    chats = made()
    yield chats
    await chats.close()


async def render(chats: ImageChats, *files: str, salt: str = "") -> RenderedPrompt:
    images = [ChatImage(file.encode(), f"messages[0].content[{i}]") for i, file in enumerate(files)]
    return await chats.render(BODY, images, ANYBODY._replace(salt=CacheSalt(salt)))


async def refusal(chats: ImageChats, *files: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await render(chats, *files)
    assert refused.value.param == "messages"
    return refused.value.message


async def test_images_have_their_places_and_digests_of_their_content(chats: ImageChats) -> None:
    prompt = await render(chats, "ok 1", "ok 2", "ok 1")
    assert [(image.offset, image.num_tokens) for image in prompt.images] == [(0, 4), (4, 4), (8, 4)]
    assert [image.features for image in prompt.images] == [b"features of ok " + number for number in (b"1", b"2", b"1")]
    one, two, three = (image.digest for image in prompt.images)
    assert one == three != two
    assert len(one) == 64
    assert len(prompt.token_ids) == 13
    assert prompt.sampling.max_tokens == 3


async def test_the_same_image_is_prepared_once_for_each_salt(chats: ImageChats) -> None:
    first = await render(chats, "ok")
    assert len(chats._kept) == 1
    # The process gets no file of an image that it need not prepare, and would have to find its features.
    again = await render(chats, "ok")
    assert again.images == first.images
    assert len(chats._kept) == 1
    await render(chats, "ok", salt="another tenant's")
    assert len(chats._kept) == 2
    assert chats.image_outcomes == {"prepared": 2, "kept": 1}


async def test_kept_images_are_limited_and_the_oldest_go_first(chats: ImageChats) -> None:
    small = made(cache_bytes=2 * (1000 + 40))
    for file in ("size 1000 a", "size 1000 b", "size 1000 a", "size 1000 c"):
        await render(small, file)
    assert [digest for _, digest in small._kept] == [small.digest_of(b"size 1000 " + name) for name in (b"a", b"c")]
    assert small._num_kept_bytes == 2 * (1000 + 40)
    await render(small, "size 3000 too large to be kept")
    assert small._num_kept_bytes == 2 * (1000 + 40)
    await small.close()


@pytest.mark.parametrize("num_over", [0, 1])
async def test_prepared_bytes_of_a_prompt_are_limited_also_of_kept_images(chats: ImageChats, num_over: int) -> None:
    small = made(max_prepared_bytes=2000)
    await render(small, "size 1000 a")
    files = ("size 1000 a", f"size {1000 + num_over} b")
    if num_over:
        assert "take 2001 bytes as the model's processor prepares them; 2000 is the limit" in (
            await refusal(small, *files)
        )
    else:
        assert len((await render(small, *files)).images) == 2
    await small.close()


async def test_a_prompt_and_its_images_fit_a_message(chats: ImageChats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine.image_chats._MAX_SENT_BYTES", 1000 + 5 * 5)
    assert (await render(chats, "size 1000")).images
    assert "too many beside 5 tokens; together they may take 1025" in await refusal(chats, "size 1001")


async def test_what_exhausts_a_fork_is_refused_and_ends_nothing_else(chats: ImageChats) -> None:
    await render(chats, "ok")
    pid = chats._process.pid
    assert "over 0.5 s of CPU time, the limit" in await refusal(chats, "spin")
    for file in ("allocate", "segfault", "recurse"):
        assert "gateway.images.memory_mib" in await refusal(chats, file)
    assert "the images cannot be prepared: refused because" in await refusal(chats, "refuse")
    await render(chats, "ok again")
    assert chats._process.pid == pid
    assert chats.outcomes == {"ok": 2, "refused": 1, "cpu_time": 1, "memory": 1, "crashed": 2, "late": 0}
    assert not psutil.Process(pid).children()


async def test_refusals_name_the_image(chats: ImageChats) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await render(chats, "ok", "refuse-image")
    assert refused.value.param == "messages[0].content[1]"
    assert refused.value.message == "messages[0].content[1]: bad"
    with pytest.raises(InvalidRequest, match="bad"):
        await render(chats, "no-code")


@pytest.mark.parametrize("file", ["garbage", "nothing", "few", "beyond", "overlap"])
async def test_a_process_that_lies_costs_the_request(chats: ImageChats, file: str) -> None:
    with pytest.raises(EngineError):
        await render(chats, file, file)
    assert not chats._kept
    await render(chats, "ok")


async def test_a_fork_that_takes_too_long_is_killed(chats: ImageChats) -> None:
    late = made(ForkLimits(cpu_s=30.0, wall_s=0.05, memory_bytes=256 << 20))
    with pytest.raises(Overloaded, match="too busy"):
        await render(late, "wait")
    await late.close()


async def test_no_more_run_and_wait_than_are_allowed(chats: ImageChats) -> None:
    await render(chats, "ok")
    held = [asyncio.create_task(render(chats, f"wait {i}")) for i in range(2 + MAX_WAITING)]
    pid = chats._process.pid
    await until(lambda: len(psutil.Process(pid).children()) == 2)
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} chats with images wait"):
        await render(chats, "ok again")
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_forks_of_clients_that_left_have_their_turns_to_the_end(chats: ImageChats) -> None:
    await render(chats, "ok")
    process = psutil.Process(chats._process.pid)
    left = [asyncio.create_task(render(chats, f"wait {i}")) for i in range(2)]
    await until(lambda: len(process.children()) == 2)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    waiting = asyncio.create_task(render(chats, "ok again"))
    await until(lambda: chats._turns.num_waiting == 1)
    assert len(process.children()) == 2
    for fork in process.children():
        fork.kill()
    assert (await waiting).images


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 10, 50])
async def test_closing_while_the_process_starts_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = fork_process._popen

    def slow(*arguments: Any) -> subprocess.Popen[bytes]:
        time.sleep(0.02)  # of a machine that is busy
        started.append(real(*arguments))
        return started[-1]

    monkeypatch.setattr(fork_process, "_popen", slow)
    chats = made()
    chats.start()
    for _ in range(num_turns):
        await asyncio.sleep(0.001)
    await chats.close()
    assert all(each.returncode is not None for each in started)
    gc.collect()  # a socket that was left open would warn


async def test_a_process_that_dies_is_started_again(chats: ImageChats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_process, "_FIRST_PAUSE_S", 0.0)
    with pytest.raises(NotReady, match="images cannot be prepared now: their process ended or hangs"):
        await render(chats, "kill")
    await render(chats, "ok")


def test_digests_differ_with_the_models_processor(tmp_path: Path) -> None:
    empty = image_identity(str(tmp_path), "float32")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    one = image_identity(str(tmp_path), "float32")
    (tmp_path / "preprocessor_config.json").write_text('{"size": 1}')
    two = image_identity(str(tmp_path), "float32")
    (tmp_path / "preprocessor_config.json").write_text('{"size": 2}')
    assert len({empty, one, two, image_identity(str(tmp_path), "float32")}) == 4
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert len({two, image_identity(str(tmp_path), "float32")}) == 2
    assert image_identity(str(tmp_path), "bfloat16") != image_identity(str(tmp_path), "float32")
