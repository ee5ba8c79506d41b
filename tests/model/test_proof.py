"""Proofs of transfers between real engines: right pages are proven, damaged ones are not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.proof import DAMAGED_KINDS, DAMAGES, damaging_connector, model_of, prove, set_damage
from bench.proof_models import KINDS
from bench.vllm_engines import VllmPair, start_pair
from kvferry.proof.verdict import Outcome
from support.all_models import only_with_all_models

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It says how the decode engine damages what arrives."""
    return tmp_path_factory.mktemp("damage") / "damage"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def damaging_pair(file: Path) -> AsyncIterator[VllmPair]:
    with damaging_connector(file):
        pair = await start_pair(model_of("default", file.parent))
    yield pair
    await pair.stop()


async def test_right_pages_are_proven_and_damaged_ones_are_not(damaging_pair: VllmPair, file: Path) -> None:
    for seed in (1, 2):
        verdict, measured = await prove(damaging_pair, seed)
        assert verdict.outcome is Outcome.PROVEN, (verdict, measured)
    for number, damage in enumerate(DAMAGES):
        set_damage(file, damage)
        verdict, measured = await prove(damaging_pair, 100 + number)
        set_damage(file, "")
        assert verdict.outcome is not Outcome.PROVEN, (damage, measured)


@only_with_all_models
@pytest.mark.parametrize("kind", [kind for kind in DAMAGED_KINDS if not kind.startswith("default")])
async def test_pages_of_each_kind_of_model_are_proven(kind: str, tmp_path: Path) -> None:
    pair = await start_pair(model_of(kind, tmp_path), **KINDS[kind].settings)
    try:
        verdict, measured = await prove(pair, 1)
    finally:
        await pair.stop()
    assert verdict.outcome is Outcome.PROVEN, (verdict, measured)


@only_with_all_models
async def test_latent_attention_is_not_proven_on_a_cpu(tmp_path: Path) -> None:
    pair = await start_pair(model_of("deepseek-v2", tmp_path))
    try:
        verdict, measured = await prove(pair, 1)
    finally:
        await pair.stop()
    assert verdict.outcome is not Outcome.PROVEN, measured
