"""The catalogue of GPUs: memory as the driver reports it, bandwidths, dense FLOPs, links and dated prices."""

# `gpus.yaml` ships with the package. A file of the user has the same form; its entries win, key by key.

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvferry.errors import ConfigError
from kvferry.util import plain_yaml

MAX_GPUS: Final = 256
MAX_PRICES: Final = 16  # of one GPU
MAX_FILE_BYTES: Final = 1 << 20
_FILE: Final = "gpus.yaml"

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")]


def _printable(text: str) -> str:
    # Texts stand in comments of shell commands and YAML: a newline would begin a line of its own.
    if not text.isprintable():
        raise ValueError("control characters, newlines among them, are not allowed")
    return text


Text = Annotated[str, AfterValidator(_printable)]
Positive = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
PriceKind = Literal["on-demand", "spot", "own"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Price(_Entry):
    """US dollars for one GPU and hour, of one seller on one day."""

    usd_per_hour: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    kind: PriceKind = "own"
    source: Text = Field("", max_length=200)
    date: datetime.date | None = None

    def text(self) -> str:
        when = f" of {self.date}" if self.date else ""
        where = f" ({self.source}{when})" if self.source else when
        return f"{self.usd_per_hour:g} USD/h {self.kind}{where}"


class Gpu(_Entry):
    """One kind of GPU, or a CPU node, which counts as one."""

    title: Text = Field(max_length=200)
    # CUDA's compute capability, AMD's architecture, or `cpu`: decides KV dtypes and attention backends.
    compute_capability: Annotated[str, Field(pattern=r"^(\d{1,2}\.\d|gfx[0-9a-f]{3,5}|cpu)$")]
    memory_bytes: Annotated[int, Field(ge=1 << 30, le=1 << 50)]
    memory_bytes_s: Positive
    flops: dict[Literal["bfloat16", "float32", "fp8", "fp4", "int8"], Positive] = Field(min_length=1)  # dense
    peer_bytes_s: Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]  # to its peers, in one direction; 0: none
    peer_gpus: Annotated[int, Field(ge=1, le=4096)]  # GPUs that such a link joins
    host_bytes_s: Positive  # between GPU and host, in one direction
    network_bytes_s: Positive  # between nodes, each GPU, in one direction
    gpus_per_node: Annotated[int, Field(ge=1, le=64)]
    source: Text = Field("", max_length=400)
    source_date: datetime.date | None = None
    prices: tuple[Price, ...] = Field((), max_length=MAX_PRICES)

    @property
    def is_cpu(self) -> bool:
        return self.compute_capability == "cpu"

    def flops_of(self, dtype: str) -> tuple[float, str]:
        """Return dense FLOP/s for weights of `dtype` and the type that computes: the next wider one it has."""
        for each in _COMPUTED_IN.get(dtype, ("bfloat16", "float32")):
            if each in self.flops:
                return self.flops[each], each
        name, rate = next(iter(self.flops.items()))
        return rate, name

    def price(self) -> Price | None:
        """Return the cheapest of the user's own prices, else on demand, else spot; None where none is known."""
        for kind in ("own", "on-demand", "spot"):
            found = [price for price in self.prices if price.kind == kind]
            if found:
                return min(found, key=lambda price: price.usd_per_hour)
        return None


# Types in which weights of a type are computed, best first. FP8 weights run in bfloat16 where the GPU has no FP8, and
# FP4 weights where it has no FP4: vLLM unpacks them (Marlin).
_COMPUTED_IN: Final[dict[str, tuple[str, ...]]] = {
    "fp4": ("fp4", "bfloat16"),
    "fp8": ("fp8", "bfloat16"),
    "int8": ("int8", "bfloat16"),
    "int4": ("bfloat16",),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("bfloat16", "float32"),
    "float32": ("float32", "bfloat16"),
}


class _Catalogue(_Entry):
    gpus: dict[Name, Gpu] = Field(max_length=MAX_GPUS)


@functools.cache
def shipped() -> Mapping[str, Gpu]:
    """Return the GPUs of the package, by name."""
    return parse(_shipped_content(), _FILE)


def _shipped_content() -> Any:
    return plain_yaml.load(resources.files("kvferry_plan.planner").joinpath(_FILE).read_bytes())


def merged(content: bytes, name: str) -> Mapping[str, Gpu]:
    """Return the shipped catalogue with the user's file over it. Raises ConfigError naming `name` and the key."""
    try:
        plain_yaml.check_size(content, MAX_FILE_BYTES)
        own = plain_yaml.load(content)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(own, dict) or not isinstance(own.get("gpus"), dict) or len(own) != 1:
        raise ConfigError(f"{name}: expected one key, `gpus`, with an entry for each GPU")
    gpus = dict(_shipped_content()["gpus"])
    for key, entry in own["gpus"].items():
        known = gpus.get(key)
        gpus[key] = {**known, **entry} if isinstance(known, dict) and isinstance(entry, dict) else entry
    return parse({"gpus": gpus}, name)


def parse(content: Any, name: str) -> Mapping[str, Gpu]:
    """Raises ConfigError that names file, GPU and key."""
    try:
        return _Catalogue.model_validate(content).gpus
    except ValidationError as error:
        faults = [
            f"{name}: {'.'.join(_escaped(str(key))[:80] for key in fault['loc'])}: {fault['msg']}"
            for fault in error.errors()[:8]
        ]
        raise ConfigError("\n".join(faults)) from None


def _escaped(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def find(gpus: Mapping[str, Gpu], name: str) -> Gpu:
    """Raises ConfigError that lists the known names."""
    found = gpus.get(name)
    if found is None:
        raise ConfigError(f"--gpu {name[:80]!r}: unknown; known are {', '.join(sorted(gpus))}")
    return found
