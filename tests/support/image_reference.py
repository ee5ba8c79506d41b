"""vLLM's own offline engine for chats and prompts with images, without kvferry and without a prefix cache.

It runs in a process of its own, because its settings are not those of kvferry's engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.waiting import PATIENCE_S

MAX_MODEL_LEN = 2048


def ask(module: str, model_folder: Path, scratch: Path) -> dict[str, Any]:
    """Run `python -m module MODEL_FOLDER FILE`, and return the JSON that it writes to FILE."""
    file = scratch / f"{module.rpartition('.')[2]}.json"
    command = [sys.executable, "-m", module, str(model_folder), str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the reference engine failed: {done.stderr[-4000:]}")
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def answer(values_of: Callable[[Any], dict[str, Any]], **settings: Any) -> None:
    """Write what `values_of` returns for the engine: the body of the module that `ask` runs."""
    model_folder, file = sys.argv[1:]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    from vllm import LLM

    engine = LLM(
        model_folder,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        disable_log_stats=True,
        **settings,
    )
    Path(file).write_text(json.dumps(values_of(engine)), encoding="utf-8")
