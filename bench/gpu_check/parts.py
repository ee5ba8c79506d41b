"""The parts of the plan, as data, in the order in which they run: what everything else needs first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.engine_device import DEVICE, ENGINE, MODEL

TOTAL_LIMIT_S = 5400
OUT = "{out}"  # in commands: the folder for what a part writes


@dataclass(frozen=True)
class Part:
    """`command` is of this Python, from the repository's root."""

    name: str
    proves: str
    kind: Literal["tests", "bench"]
    command: tuple[str, ...]
    limit_s: int
    environ: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 1
    capability: int = 80  # at least; 90 is compute capability 9.0
    memory_mib: int = 20_000  # of a GPU, at least
    programs: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        return {DEVICE: "gpu", "TRITON_F32_DEFAULT": "ieee", **self.environ}

    def arguments(self, out: str) -> list[str]:
        return [argument.replace(OUT, out) for argument in self.command]

    def dry_arguments(self, out: str) -> list[str]:
        """Return the command as it reads its arguments, imports what it needs, and runs nothing."""
        return [*self.arguments(out), *(("--collect-only", "-q") if self.kind == "tests" else ("--help",))]


def _tests(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-p", "no:cacheprovider", *arguments, f"--junitxml={OUT}/tests.xml")


def _engine(**values: Any) -> dict[str, str]:
    return {ENGINE: json.dumps(values)}


_EXACTNESS = _tests("tests/model/test_exactness.py")
# vLLM's kernels whose results do not depend on what else is in a batch: bit for bit the same in half precision too.
_BATCH_INVARIANT = {"env": {"VLLM_BATCH_INVARIANT": "1"}}


PARTS: Sequence[Part] = (
    Part(
        "exact",
        "prompts of 30 to 3,000 tokens, transferred by NIXL from CUDA memory to CUDA memory, give the tokens of one "
        "engine; float32, CUDA graphs, asynchronous scheduling; grammars, late and lost transfers",
        "tests",
        _EXACTNESS,
        480,
    ),
    Part(
        "exact-eager",
        "the same without CUDA graphs and without asynchronous scheduling: what differs from `exact` is theirs",
        "tests",
        _tests("tests/model/test_exactness.py", "-k", "disaggregated or say_what"),
        240,
        _engine(enforce_eager=True, args={"async_scheduling": False}),
    ),
    Part(
        "exact-bfloat16",
        "the same in bfloat16 with vLLM's batch-invariant kernels, for FlashAttention's pages",
        "tests",
        _tests("tests/model/test_exactness.py", "-k", "disaggregated or grammar_goes_on"),
        300,
        {MODEL: '{"dtype": "bfloat16"}', **_engine(**_BATCH_INVARIANT)},
        capability=90,
    ),
    Part(
        "tiers",
        "pages from the CPU tier (pinned memory, CUDA streams), from a volume and from another node's volume are those "
        "that were computed; floors of device, CPU tier and volume survive floods; corrupted chunks, killed engines "
        "and keepers",
        "tests",
        _tests("tests/model/test_tier.py"),
        540,
    ),
    Part(
        "contract",
        "what every engine owes its callers: aborts, limits, log-probabilities, events, continuation",
        "tests",
        _tests("tests/contract/test_engine_contract.py", "-k", "vllm"),
        360,
    ),
    Part(
        "proof",
        "transfers of every kind of model are proven in the type that they are served in: fp8 pages, latent attention, "
        "sinks, windows, recurrent layers, 4-bit weights",
        "bench",
        ("-m", "bench.proof", "--kinds", "all", "--damages", "", "--undamaged", "3"),
        1200,
        {MODEL: json.dumps({"dtype": "bfloat16"})},
        capability=89,
    ),
    Part(
        "proof-damages",
        "proofs notice each damage of transferred pages",
        "bench",
        ("-m", "bench.proof", "--kinds", "default-bfloat16,llama-fp8", "--undamaged", "1"),
        300,
        capability=89,
    ),
    Part(
        "bench-handoff",
        "bytes per second of a transfer between CUDA memories beside raw NIXL with the same bytes",
        "bench",
        ("-m", "bench.kv_transfer", "--tokens", "512,2048,4096"),
        270,
    ),
    Part(
        "bench-tier",
        "verified reads of chunks into pinned memory and on to the GPU, and back, beside fio",
        "bench",
        ("-m", "bench.tier", "--device", "gpu", "--page-kib", "2048", "--rounds", "5", "--scan-pages", "20000"),
        240,
        programs=("fio",),
    ),
    Part(
        "rag-chat",
        "a RAG chat on kvferry and on two `vllm serve`, half of the GPU for each engine",
        "bench",
        ("-m", "bench.rag", "--only", "kvferry", "--only", "vllm-rr", "--repeats", "1", "--out", f"{OUT}/rag"),
        540,
    ),
    Part(
        "exact-unequal-ranks",
        "pages of 1 tensor-parallel rank come to 2, and of 2 to 1, and answers are those of one engine (a model with 2 "
        "KV heads)",
        "tests",
        _tests("tests/model/test_unequal_ranks.py"),
        420,
        {"KVFERRY_ALL_MODELS": "1"},
        num_gpus=2,
    ),
    Part(
        "speculation",
        "answers with drafts by n-grams, a draft model and EAGLE heads are those without, wherever pages come from",
        "tests",
        _tests("tests/model/test_speculation.py", "tests/model/test_draft_model.py"),
        330,
        {"KVFERRY_ALL_MODELS": "1"},
    ),
    Part(
        "models",
        "transfers, failed transfers, prefixes and volumes of a tiny model of each kind of attention that is served",
        "tests",
        _tests("tests/model/test_models.py"),
        900,
        {"KVFERRY_ALL_MODELS": "1"},
    ),
)  # fmt: skip


def why_skipped(part: Part, capabilities: Sequence[int], memories_mib: Sequence[int], missing: Sequence[str]) -> str:
    """Return what a part lacks on GPUs of such capabilities and memories; `missing` are programs that are not here."""
    fit = sum(
        capability >= part.capability and memory >= part.memory_mib
        for capability, memory in zip(capabilities, memories_mib, strict=True)
    )
    if fit < part.num_gpus:
        return (
            f"it needs {part.num_gpus} GPU(s) of compute capability {part.capability / 10:g} or more with "
            f"{part.memory_mib} MiB; here are {fit}"
        )
    lacking = sorted(set(part.programs) & set(missing))
    return f"{', '.join(lacking)} is not installed" if lacking else ""
