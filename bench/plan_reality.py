"""Compare `kvferry plan` after --calibrate with real engines on this machine's CPU, for two models of different shape.

    make bench-plan        about five minutes

Each figure is a line of JSON on stdout when it is measured, and the last line has all. The exit code is 1 where a
request or a cluster fails, and where a plan is off by more than the limit.

For each model one worker with vLLM is started, measured as `--calibrate` does, and compared at points that the fit did
not see: KV pages, the requests of the longest context that vLLM says fit, a prompt of another length, another batch.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
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

import httpx

import kvferry
from bench.results import BenchFailed, Results, run_benchmark
from kvferry import model_folder
from kvferry_plan import model_catalogue
from kvferry_plan.commands import measuring
from kvferry_plan.planner.assumptions import DEFAULTS
from kvferry_plan.planner.calibration import calibrate
from kvferry_plan.planner.gpu_catalogue import shipped
from kvferry_plan.planner.layouts import Layout
from kvferry_plan.planner.memory import kv_room
from kvferry_plan.planner.models import planned
from kvferry_plan.planner.roofline import Engine

BLOCK_SIZE = 32
KV_CACHE_GIB = 1
CONTEXT = 2048
LIMIT = 0.10
_BATCH = 6  # between two that are calibrated
_PROMPT_TOKENS, _ANSWER_TOKENS = 1856, 64  # of requests that fill the pages
_RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} ([\d.e+]+)$", re.MULTILINE)


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
        "model.max_model_len": CONTEXT, "gateway.http_port": 0, "gateway.grpc_port": "null", "engine.max_num_seqs": 64,
        "model.dtype": "float32",
    }  # fmt: skip
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    up = [*command, "up", "--no-ask", "--model", model, *flags]
    if exit_code := subprocess.run(up, env=environ, check=False, stdout=sys.stderr).returncode:
        raise BenchFailed(f"kvferry up with {model} ended with {exit_code}")
    try:
        status = json.loads(subprocess.check_output([*command, "status", "--json"], env=environ, text=True))
        yield status["url"], status
    finally:
        subprocess.run([*command, "down"], env=environ, check=True, stdout=sys.stderr)


async def most_running(url: str, metrics: str, name: str, num_requests: int) -> float:
    """Send so many requests at once, more than fit, and return how many vLLM computed at the same time at most.

    Raises BenchFailed for a request that fails.
    """
    most = 0.0
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:

        async def ask(number: int) -> None:
            # A prompt of token ids, which nothing has cached.
            prompt = [1000 + (number * 7919 + position * 31) % 40_000 for position in range(_PROMPT_TOKENS)]
            body = {"model": name, "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "ignore_eos": True}
            answer = await client.post(f"{url}/v1/completions", json=body)
            if answer.status_code != 200:
                raise BenchFailed(f"request {number} of {num_requests}: {answer.status_code}: {answer.text[:200]}")

        waiting = asyncio.gather(*(ask(number) for number in range(num_requests)))
        while not waiting.done():
            text = (await client.get(f"http://{metrics}/metrics")).text
            most = max([most, *(float(found) for found in _RUNNING.findall(text))])
            await asyncio.wait([waiting], timeout=0.1)
        await waiting
    return most


def compare(name: str, model: str, num_parameters: int | None) -> Iterator[Compared]:
    geometry = model_catalogue.geometry_of(model)
    planned_model = planned(geometry, "float32", num_parameters or geometry.num_parameters, None)
    gpu = shipped()["cpu-node"]
    engine = Engine(planned_model, gpu, Layout(1), "float32", DEFAULTS)
    room = kv_room(planned_model, Layout(1), KV_CACHE_GIB << 30, "float32", BLOCK_SIZE, DEFAULTS)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder, a_cluster(model, Path(folder) / "run") as (url, status):
        (decode,) = (member for member in status["members"] if member["kind"] == "decode")
        yield Compared(name, "KV pages", room.num_pages_in_all, decode["load"]["num_pages"])
        tokens = _PROMPT_TOKENS + _ANSWER_TOKENS
        fit = room.num_pages_in_all // room.pages_of(tokens)
        running = asyncio.run(most_running(url, decode["metrics_address"], status["model"], fit + 4))
        yield Compared(name, f"requests of {tokens} tokens at once", fit, running)
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


def measure(results: Results) -> None:
    worst = 0.0
    results.add({"kvferry": kvferry.__version__, "limit": LIMIT})
    with tempfile.TemporaryDirectory(prefix="plan-model-") as folder:
        tiny = _windowed_model(Path(folder) / "windowed")
        for name, model in (
            ("SmolLM2-135M: grouped attention", model_folder.DEFAULT_NAME),
            ("Gemma 3 shape: windows in 9 of 12 layers", str(tiny)),
        ):
            parameters = None if model == model_folder.DEFAULT_NAME else _num_parameters(tiny)
            for each in compare(name, model, parameters):
                worst = max(worst, each.error)
                row = {**dataclasses.asdict(each), "error": round(each.error, 4)}
                results.add({"compared": [row], "worst_error": round(worst, 4)})
    if worst > LIMIT:
        raise BenchFailed(f"a plan is off by {worst:.1%}, over the limit of {LIMIT:.0%}")


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    return run_benchmark("bench-plan", measure)


def _windowed_model(folder: Path) -> Path:
    """Random weights in Gemma 3's shape, with pages large enough to fill a pool."""
    import torch
    import transformers

    source = model_folder.resolve(model_folder.DEFAULT_NAME)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    config = transformers.Gemma3TextConfig(
        vocab_size=49152, hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, sliding_window=512, max_position_embeddings=4096,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


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
