"""The device of the engines that tests and benchmarks start, and further settings of them, from the environment.

KVFERRY_TEST_DEVICE is `cpu` (default) or `gpu`. KVFERRY_TEST_ENGINE is JSON with keys of `engine` of the configuration,
KVFERRY_TEST_PREFILL and KVFERRY_TEST_DECODE are the same for one role, and KVFERRY_TEST_MODEL has keys of `model`. They
win over what a test asks for, but for `args`, which are joined.

On GPUs models are computed in float32 unless KVFERRY_TEST_MODEL says otherwise: in half precision the order of
additions, and so now and then a token, depends on how prompts are cut and which requests share a step. Of vLLM's
backends TRITON_ATTN takes float32 pages; TRITON_F32_DEFAULT=ieee keeps Triton from multiplying them in TF32, which has
no more digits than half precision.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the names of gpu-check's parts are read where nothing is installed
    from kvferry.config import EngineConfig, ModelConfig

Role = Literal["prefill", "decode"]

DEVICE, ENGINE, MODEL = "KVFERRY_TEST_DEVICE", "KVFERRY_TEST_ENGINE", "KVFERRY_TEST_MODEL"
OF_ROLE: Mapping[Role, str] = {"prefill": "KVFERRY_TEST_PREFILL", "decode": "KVFERRY_TEST_DECODE"}

# Both engines of a test are on one GPU, and few pages make floods short: as many as a GiB has on the CPU, whose tests
# count on them. vLLM still measures what a step needs, and the share has to hold that and the pages.
_OF_GPU: Mapping[str, Any] = {
    "device": "gpu",
    "gpu_memory_utilization": 0.3,
    "args": {"num_gpu_blocks_override": 728},
}
_OF_CPU: Mapping[str, Any] = {"device": "cpu", "threads": 1}


def on_gpu() -> bool:
    """Raises ValueError for a device that there is not."""
    device = os.environ.get(DEVICE, "cpu")
    if device not in ("cpu", "gpu"):
        raise ValueError(f"{DEVICE}={device[:80]!r}: cpu or gpu")
    return device == "gpu"


def engine_config(role: Role, **settings: Any) -> EngineConfig:
    """Return a test's settings of one engine on the device. Raises ValueError for variables that cannot be used."""
    from kvferry.config import EngineConfig

    return EngineConfig(**_joined(_OF_GPU if on_gpu() else _OF_CPU, settings, _of(ENGINE), _of(OF_ROLE[role])))


def model_config(**settings: Any) -> ModelConfig:
    """As `engine_config`."""
    from kvferry.config import ModelConfig

    return ModelConfig(**_joined({"dtype": "float32"} if on_gpu() else {}, settings, _of(MODEL)))


def _joined(*layers: Mapping[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            joined[key] = {**joined.get(key, {}), **value} if key == "args" else value
    return joined


def _of(variable: str) -> Mapping[str, Any]:
    try:
        values = json.loads(os.environ.get(variable) or "{}")
    except ValueError as error:
        raise ValueError(f"{variable}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{variable}: a JSON object is expected")
    return values
