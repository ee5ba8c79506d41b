"""Proofs of transfers between real engines: right pages are proven, damaged ones are not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.engine_device import on_gpu
from bench.proof import DAMAGES, MAX_REASON_CHARS, damaging_connector, model_of, prove, set_damage
from bench.proof_models import KINDS
from bench.proof_record import Row, record, row_of
from bench.vllm_engines import VllmPair, start_pair
from kvferry.errors import KvferryError
from kvferry.proof.measure import NotComparable
from kvferry.proof.verdict import Outcome, Verdict
from support.all_models import only_with_all_models

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


# Latent attention differs from itself with the cut of a prompt; Mamba 2 ends the engine: vLLM 0.32.
NOT_PROVEN_ON_CPUS = {"deepseek-v2", "falcon-h1", "falcon-h1-bf16", "mamba2"}
# With random weights, attention looks at one token alone: a wrong one elsewhere changes nothing in some prompts.
HARDLY_NOTICE = {"granite"}


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


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """Rows of the record of proofs, which are written in the end."""
    seen: list[Row] = []
    yield seen
    if seen:
        record(seen)


@only_with_all_models
@pytest.mark.parametrize("kind", KINDS)
async def test_pages_of_each_kind_of_model_are_proven(kind: str, tmp_path: Path, rows: list[Row]) -> None:
    from vllm import __version__

    from kvferry.engine.vllm.plugins.exchange_fields import device_name

    pair = None
    try:
        pair = await start_pair(model_of(kind, tmp_path), **KINDS[kind].settings)
        verdict, measured = await prove(pair, 1)
    except (KvferryError, NotComparable) as error:
        verdict, measured = Verdict(Outcome.UNDECIDED, str(error)[:MAX_REASON_CHARS]), []
    finally:
        if pair is not None:
            await pair.stop()
    rows.append(row_of(kind, device_name(1), __version__, KINDS[kind].dtype, verdict, measured))
    if kind in HARDLY_NOTICE:
        assert verdict.outcome is not Outcome.REFUTED, (verdict, measured)
        assert measured, verdict
    else:
        is_expected = on_gpu() or kind not in NOT_PROVEN_ON_CPUS
        assert (verdict.outcome is Outcome.PROVEN) == is_expected, (verdict, measured)
