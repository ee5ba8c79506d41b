"""Compare `kvferry plan` after --calibrate with real engines on this machine's CPU, for two models of different shape.

    python -m bench.plan_reality        about five minutes; the last line is JSON

For each model one worker with vLLM is started, measured as `--calibrate` does, and compared at points that the fit did
not see: KV pages, the requests of the longest context that vLLM says fit, a prompt of another length, another batch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvferry
from bench.tiny_models import make_model
from kvferry import model_catalogue, model_folder
from kvferry.plan_commands import measuring
from kvferry.planner.assumptions import DEFAULTS
from kvferry.planner.calibration import calibrate
from kvferry.planner.gpu_catalogue import shipped
from kvferry.planner.layouts import Layout
from kvferry.planner.memory import kv_room
from kvferry.planner.models import planned
from kvferry.planner.roofline import Engine

BLOCK_SIZE = 32
KV_CACHE_GIB = 1
CONTEXT = 2048
LIMIT = 0.10
_BATCH = 6  # between two that are calibrated
_MAX_LOG_BYTES = 64 << 20
_CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")


@dataclass(frozen=True, slots=True)
class Compared:
    model: str
    what: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.planned / self.measured - 1)


@contextmanager
def a_cluster(model: str, run_dir: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """One worker that computes prompts and answers. Yields the gateway's URL and the members."""
    environ = {**os.environ, "KVFERRY_RUN_DIR": str(run_dir)}
    command = [str(Path(sys.executable).with_name("kvferry"))]
    settings = {
        "prefill.replicas": 0, "engine.block_size": BLOCK_SIZE, "engine.kv_cache_gib": KV_CACHE_GIB,
        "model.max_model_len": CONTEXT, "gateway.http_port": 0, "gateway.grpc_port": "null", "engine.max_num_seqs": 16,
        "model.dtype": "float32",
    }  # fmt: skip
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([*command, "up", "--no-ask", "--model", model, *flags], env=environ, check=True, stdout=sys.stderr)
    try:
        status = json.loads(subprocess.check_output([*command, "status", "--json"], env=environ, text=True))
        yield status["url"], status
    finally:
        subprocess.run([*command, "down"], env=environ, check=True, stdout=sys.stderr)


def said_concurrency(run_dir: Path) -> float:
    """What vLLM logs at its start: requests of the longest context that its pages hold."""
    for file in run_dir.rglob("*"):
        if not file.is_file() or file.suffix not in (".err", ".out", ".log") or file.stat().st_size > _MAX_LOG_BYTES:
            continue
        if found := _CONCURRENCY.search(file.read_text(encoding="utf-8", errors="replace")):
            return float(found[1])
    raise SystemExit(f"no log below {run_dir} says how many requests fit")


def compare(name: str, model: str, num_parameters: int | None) -> Iterator[Compared]:
    geometry = model_catalogue.geometry_of(model)
    planned_model = planned(geometry, "float32", num_parameters or geometry.num_parameters, None)
    gpu = shipped()["cpu-node"]
    engine = Engine(planned_model, gpu, Layout(1), "float32", DEFAULTS)
    room = kv_room(planned_model, Layout(1), KV_CACHE_GIB << 30, "float32", BLOCK_SIZE, DEFAULTS)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder, a_cluster(model, Path(folder) / "run") as (url, status):
        (decode,) = (member for member in status["members"] if member["kind"] == "decode")
        yield Compared(name, "KV pages", room.num_pages_in_all, decode["load"]["num_pages"])
        fit = (room.num_pages_in_all + 1) / room.pages_of(CONTEXT)
        yield Compared(name, f"requests of {CONTEXT} tokens", fit, said_concurrency(Path(folder)))
        measured = measuring.measure(url, longest_tokens=CONTEXT, batches=(1, 2, 4, _BATCH, 8))
        seen = [each for each in measured.prefills if each is not measured.prefills[-2]]
        batches = [each for each in measured.decodes if each.num_requests != _BATCH]
        found = calibrate(engine, seen, batches)
        after = Engine(planned_model, gpu, Layout(1), "float32", found.assumptions)
        prompt = measured.prefills[-2]
        rate = prompt.num_tokens / after.prefill(prompt.num_tokens).total_s
        yield Compared(
            name, f"prefill of {prompt.num_tokens} tokens, tokens/s", rate, prompt.num_tokens / prompt.seconds
        )
        (step,) = (each for each in measured.decodes if each.num_requests == _BATCH)
        tokens_s = after.tokens_per_s(_BATCH, step.context_tokens)
        yield Compared(name, f"decode of {_BATCH} streams, tokens/s", tokens_s, _BATCH / step.seconds)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    results: list[Compared] = []
    with tempfile.TemporaryDirectory(prefix="plan-model-") as folder:
        tiny = make_model("gemma3", Path(folder) / "gemma3")
        for name, model in (
            ("SmolLM2-135M: grouped attention", model_folder.DEFAULT_NAME),
            ("tiny Gemma 3: windows in 3 of 4 layers", str(tiny)),
        ):
            parameters = None if model == model_folder.DEFAULT_NAME else _num_parameters(tiny)
            for each in compare(name, model, parameters):
                results.append(each)
                print(
                    f"{each.model:40} {each.what:36} planned {each.planned:10.1f} measured {each.measured:10.1f} "
                    f"off by {each.error:5.1%}",
                    flush=True,
                )
    worst = max(each.error for each in results)
    print(json.dumps({"kvferry": kvferry.__version__, "worst_error": round(worst, 4), "limit": LIMIT}))
    return 0 if worst <= LIMIT else 1


def _num_parameters(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            for key in weights.keys():  # noqa: SIM118  # no mapping
                size = 1
                for length in weights.get_slice(key).get_shape():
                    size *= length
                total += size
    return total


if __name__ == "__main__":
    sys.exit(main())
