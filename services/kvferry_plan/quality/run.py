"""Runs samples and tasks on one engine with one type of KV pages (`python -m kvferry_plan.quality.run FOLDER`).

Reads FOLDER/run.json. Writes FOLDER/NUMBER.npy (log-probabilities of the scored positions of a sample, float32) and
FOLDER/answers.json (token ids of the answers to the tasks); says each step as a line of JSON on stdout. vLLM reads its
variables once, and keeps memory until its process ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

RUN_FILE, ANSWERS_FILE = "run.json", "answers.json"
SPOIL = "kvferry_spoil"  # of a worker extension of tests


class ForcedSample(msgspec.Struct, frozen=True):
    number: int
    context: list[int]  # token ids
    forced: list[int]  # token ids that are scored, each after all before it


class QualityRun(msgspec.Struct, frozen=True):
    model_folder: str
    compute_dtype: str
    kv_cache_dtype: str
    device: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    vocab_size: int
    samples: list[ForcedSample]
    tasks: list[list[int]]  # prompts, as token ids
    max_answer_tokens: int
    worker_extension: str = ""  # of tests: a class whose method SPOIL makes the engine wrong


def sample_file(folder: Path, number: int) -> Path:
    return folder / f"{number}.npy"


def run(folder: Path, say: Callable[[dict[str, Any]], None]) -> None:
    import numpy as np
    from vllm import LLM, SamplingParams

    from kvferry_plan.quality.forced_tokens import FORCED, ForcedTokens

    spec = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=QualityRun)
    llm = LLM(**_arguments(spec), logits_processors=[ForcedTokens])
    if spec.worker_extension:
        llm.collective_rpc(SPOIL)
    say({"step": "started"})
    for length in sorted({len(sample.context) for sample in spec.samples}):
        samples = [sample for sample in spec.samples if len(sample.context) == length]
        prompts: list[Any] = []
        params = []
        for sample in samples:
            file = sample_file(folder, sample.number)
            shape = (len(sample.forced), spec.vocab_size)
            np.save(file, np.zeros(shape, dtype=np.float32))
            prompts.append({"prompt_token_ids": sample.context})
            forced = {"file": str(file), "tokens": sample.forced}
            params.append(_greedy(SamplingParams, len(sample.forced), extra_args={FORCED: forced}))
        for sample, output in zip(samples, llm.generate(prompts, params, use_tqdm=False), strict=True):
            if list(output.outputs[0].token_ids) != sample.forced:
                raise RuntimeError(f"sample {sample.number} was not forced: vLLM changed its logits processors")
        say({"step": "scored", "num_tokens": length, "num_samples": len(samples)})
    tasks: list[Any] = [{"prompt_token_ids": prompt} for prompt in spec.tasks]
    outputs = llm.generate(tasks, _greedy(SamplingParams, spec.max_answer_tokens), use_tqdm=False) if tasks else []
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    (folder / ANSWERS_FILE).write_text(json.dumps(answers), encoding="utf-8")
    say({"step": "answered", "num_tasks": len(tasks)})


def _arguments(spec: QualityRun) -> dict[str, Any]:
    optional: dict[str, Any] = {
        "gpu_memory_utilization": None if spec.device == "cpu" else spec.gpu_memory_utilization,
        "worker_extension_cls": spec.worker_extension or None,
    }
    return {
        "model": spec.model_folder,
        "dtype": spec.compute_dtype,
        "kv_cache_dtype": spec.kv_cache_dtype,
        "block_size": spec.block_size,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "skip_tokenizer_init": True,
        "enforce_eager": spec.device == "cpu",
        # Each sample is computed from its own pages, and positions are counted by the tokens that are known.
        "enable_prefix_caching": False,
        "async_scheduling": False,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _greedy(sampling_params: Any, max_tokens: int, **more: Any) -> Any:
    return sampling_params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more)


if __name__ == "__main__":
    # What vLLM and its processes write goes to stderr.
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        run(Path(sys.argv[1]), lambda facts: print(json.dumps(facts), file=lines, flush=True))
