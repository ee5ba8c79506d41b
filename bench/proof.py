"""Proofs of transfers between real engines, with pages that are damaged on arrival and without; the last line is JSON.

    make bench-proof

Each damage has to be found in every kind of model: a transfer that is proven though its pages are damaged ends it with
exit code 1, as does one that is not proven though nothing is damaged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import Progress

from bench.engine_device import model_config, on_gpu
from bench.machine_turn import machine_turn
from bench.proof_models import KINDS, make
from bench.results import BenchFailed, Results, run_benchmark
from bench.vllm_engines import VllmPair, start_pair
from kvferry import model_folder
from kvferry.config import ModelConfig
from kvferry.engine.base import Engine, EngineOutput, EngineRequest
from kvferry.engine.vllm import engine as vllm_engine
from kvferry.engine.vllm.start import arguments as engine_arguments
from kvferry.errors import KvferryError
from kvferry.model_folder import DEFAULT_NAME
from kvferry.proof.measure import Answered, Ask, Measurement, NotComparable, answered
from kvferry.proof.verdict import TEXT, Distances, Outcome, Verdict, judge, longest_prompt, prompts

# Read by bench.damaged_transfers, in the engines' processes.
DAMAGE_VARIABLE = "KVFERRY_DAMAGE"
MAX_REASON_CHARS = 300
MODULE, CLASS = "bench.damaged_transfers", "DamagingConnector"

DAMAGES = (
    *("exchanged", "shifted", "of-another-prompt", "of-another-layer"),
    *("keys-for-values", "head-zeroed", "scale-lost", "stale"),
)
STALE_STATE = "stale-state"  # of kinds with recurrent layers
# Kinds with damaged pages; `proof_models` has others.
DAMAGED_KINDS = (
    *("default", "default-bfloat16", "llama", "llama-fp8", "gemma3", "mistral", "mixtral", "cohere2"),
    *("gpt-oss", "qwen3-next"),
)
NUM_UNDAMAGED = 50  # proofs of the default model without damage
MAX_MODEL_LEN = 2048


def model_of(kind: str, scratch: Path) -> ModelConfig:
    which = KINDS[kind]
    folder = model_folder.resolve(which.model) if which.model == DEFAULT_NAME else make(kind, scratch / kind)
    return model_config(path=str(folder), max_model_len=MAX_MODEL_LEN, dtype=which.dtype)


def ask_of(engine: Engine) -> Ask:
    async def ask(request: EngineRequest) -> Answered:
        outputs: list[EngineOutput] = [output async for output in engine.generate(request)]
        return answered(request, outputs)

    return ask


async def prove(pair: VllmPair, seed: int) -> tuple[Verdict, Sequence[Distances]]:
    """Prove the transfer between two engines as a gateway does."""
    tokens = [token for text in TEXT for token in pair.tokenize(text)]
    block_size = pair.decode.info.block_size
    longest = longest_prompt(MAX_MODEL_LEN, block_size, on_gpu=on_gpu())
    measurement = Measurement(
        ask_of(pair.prefill), ask_of(pair.decode), block_size=block_size, tokens=tokens, name=f"proof-{seed}"
    )
    measured = [
        distances
        for number, prompt in enumerate(prompts(tokens, block_size, longest, seed))
        for distances in await measurement.distances(number, prompt)
    ]
    return judge(measured), measured


@contextlib.contextmanager
def damaging_connector(file: Path) -> Iterator[None]:
    """Let engines that start meanwhile damage transferred pages as `file` says at the time."""
    file.write_text("")
    with (
        mock.patch.dict(os.environ, {DAMAGE_VARIABLE: str(file)}),
        mock.patch.multiple(engine_arguments, CONNECTOR_MODULE=MODULE, CONNECTOR_CLASS=CLASS),
        mock.patch.multiple(vllm_engine, CONNECTOR_MODULE=MODULE, CONNECTOR_CLASS=CLASS),
    ):
        yield


def set_damage(file: Path, damage: str) -> None:
    """Damage transfers that end from now on so; empty: not at all."""
    file.write_text(damage)


async def run(
    kinds: Sequence[str], damages: Sequence[str], num_undamaged: int, results: Results, progress: Progress
) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    results.add({"machine": machine})
    totals = {"damaged": 0, "certified_though_damaged": 0, "undamaged": 0, "false_alarms": 0, "engines_failed": 0}
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, damaging_connector(file := Path(scratch) / "damage"):
        for kind in kinds:
            repeats = num_undamaged if kind == "default" else 1
            of_kind = damages if not KINDS[kind].has_states else [STALE_STATE] if damages else []
            task = progress.add_task(kind, total=len(of_kind) + repeats)
            advance = functools.partial(progress.advance, task)
            try:
                await _run_kind(kind, Path(scratch), file, of_kind, repeats, totals, results, advance)
            except (KvferryError, NotComparable) as error:
                totals["engines_failed"] += 1
                results.add({kind: {"outcome": "no result", "reason": str(error)[:MAX_REASON_CHARS]}})
    results.add({**totals, "seconds": round(time.monotonic() - begun_s, 1)})
    if totals["certified_though_damaged"] or totals["false_alarms"] or totals["engines_failed"]:
        raise BenchFailed("damages were not found, there were false alarms, or engines failed")


async def _run_kind(
    kind: str,
    scratch: Path,
    file: Path,
    damages: Sequence[str],
    repeats: int,
    totals: dict[str, int],
    results: Results,
    advance: Callable[[], None],
) -> None:
    pair = await start_pair(model_of(kind, scratch), **KINDS[kind].settings)
    try:
        for number in range(repeats):
            set_damage(file, "")
            verdict, measured = await prove(pair, number)
            totals["undamaged"] += 1
            totals["false_alarms"] += verdict.outcome is not Outcome.PROVEN
            if not number or verdict.outcome is not Outcome.PROVEN:
                results.add({f"{kind}": _figures(verdict, measured)})
            advance()
        for number, damage in enumerate(damages):
            set_damage(file, damage)
            verdict, measured = await prove(pair, 1000 + number)
            totals["damaged"] += 1
            totals["certified_though_damaged"] += verdict.outcome is Outcome.PROVEN
            results.add({f"{kind}, {damage}": _figures(verdict, measured)})
            advance()
    finally:
        await pair.stop()


def _figures(verdict: Verdict, measured: Sequence[Distances]) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome.value,
        "reason": verdict.reason,
        "distance": round(max(each.transferred for each in measured), 5),
        "noise": round(max(each.noise for each in measured), 5),
        "wrong_from": round(min(control for each in measured for control in each.controls), 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--kinds", default=",".join(DAMAGED_KINDS), help="comma-separated, or all (default: %(default)s)"
    )
    parser.add_argument("--damages", default=",".join(DAMAGES), help="likewise; may be empty (default: %(default)s)")
    parser.add_argument("--undamaged", type=int, default=NUM_UNDAMAGED, help="proofs (default: %(default)s)")
    given = parser.parse_args()
    kinds = list(KINDS) if given.kinds == "all" else given.kinds.split(",")
    damages = [damage for damage in given.damages.split(",") if damage]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds: there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    console = Console(stderr=True)

    def measure(results: Results) -> None:
        with machine_turn(console), Progress(console=console) as progress:
            asyncio.run(run(kinds, damages, given.undamaged, results, progress))

    return run_benchmark("bench-proof", measure)


if __name__ == "__main__":
    sys.exit(main())
