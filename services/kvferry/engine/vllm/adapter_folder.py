"""Copies, checks and digests of LoRA adapters' folders, before any engine loads them."""

# Two files are copied, to a folder that nothing else writes: vLLM reads an adapter again whenever it has left an
# engine's memory, and must find the bytes that page keys name.

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvferry.config import AdapterConfig, AdaptersConfig
from kvferry.errors import ConfigError
from kvferry.model_folder import TOKENIZER_FILES, from_hub
from kvferry.util.files import open_regular

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
# What tokenizers write anew when they are saved, and ids do not depend on.
_NOT_OF_THE_VOCABULARY = ("truncation", "padding")

_MAX_CONFIG_BYTES = 1 << 20
_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_HEADER_BYTES = 32 << 20
_MAX_TENSORS = 65_536
_READ_BYTES = 8 << 20

# Linear layers of attention and MLP. Adapters of embeddings, heads, experts and fused layers were not compared.
MODULES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
_TENSOR = re.compile(r"base_model\.model\.(?P<module>[A-Za-z0-9_.]+)\.lora_(?P<side>[AB])\.weight")
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# PEFT's values with which the saved matrices are a plain LoRA: vLLM refuses others, when it loads an adapter.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
_REFUSED_FEATURES = (
    "use_dora", "lora_bias", "modules_to_save", "layer_replication", "alora_invocation_tokens", "use_bdlora",
    "use_qalora", "trainable_token_indices", "target_parameters", "fan_in_fan_out",
)  # fmt: skip
# Keys of patterns are regular expressions to vLLM, which matches them against names of modules.
_PATTERN_KEY = re.compile(r"[A-Za-z0-9_.]{1,200}")
_MAX_PATTERNS = 4096
_MAX_ALPHA = 1e6
_MAX_WEIGHT = 65_504
# Times that an adapter may enlarge the largest number of a layer's input. The third power counts, in a gated MLP, and
# float32 and bfloat16 hold 3e38.
_MAX_GROWTH = 1e6

Shape = tuple[int, ...]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    name: str
    digest: str  # 32 hexadecimal digits, of both files
    folder: Path

    @property
    def key(self) -> str:
        """Name of the adapter in engines, routers and page keys."""
        return f"{self.name}@{self.digest}"


def stage(adapters: AdaptersConfig, model_folder: Path, into: Path) -> list[StagedAdapter]:
    """Copy all adapters to folders below `into`, and check the copies. Blocks.

    Raises ConfigError naming key and file.
    """
    left = int(adapters.max_gib * (1 << 30))
    base: Mapping[str, Shape] | None = None
    staged = []
    for name, adapter in sorted(adapters.served.items()):
        key = f"adapters.served.{name}.path"
        source = _located(adapter, key, left)
        _refuse_unserved_files(source, key, model_folder)
        folder = into / name
        folder.mkdir(mode=0o700, parents=True)
        digest = hashlib.sha256()
        for file in (CONFIG, WEIGHTS):
            limit = min(left, _MAX_CONFIG_BYTES) if file == CONFIG else left
            size, of_file = _copy(source / file, folder / file, limit, key)
            left -= size
            digest.update(f"{file}\0{of_file}\0".encode())
        with _naming(key, source / CONFIG):
            ranks = Ranks.of(_read_config(folder / CONFIG), adapters.max_rank)
        if base is None:
            base = _shapes_of_model(model_folder)
        with _naming(key, source / WEIGHTS):
            check_shapes(read_header(folder / WEIGHTS), ranks, base)
            check_values(folder / WEIGHTS, ranks)
        staged.append(StagedAdapter(name, digest.hexdigest()[:32], folder))
    return staged


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int
    by_module: Mapping[str, int]
    alpha: float
    alpha_by_module: Mapping[str, float]
    is_stabilized: bool  # rsLoRA

    @classmethod
    def of(cls, config: Mapping[str, Any], max_rank: int) -> Ranks:
        """Raises ValueError for what is not a plain LoRA of at most `max_rank`."""
        if (kind := config.get("peft_type", "LORA")) != "LORA":
            raise ValueError(f"peft_type is {str(kind)[:80]!r}; only LORA is served")
        for field in ("r", "lora_alpha", "target_modules"):
            if config.get(field) is None:
                raise ValueError(f"{field} is missing")
        rank, alpha, init = config["r"], config["lora_alpha"], config.get("init_lora_weights")
        by_module, alpha_by_module = _pattern(config, "rank_pattern"), _pattern(config, "alpha_pattern")
        for each in (rank, *by_module.values()):
            if not _is_whole(each) or each < 1:
                raise ValueError(f"a rank is a whole number above 0, not {str(each)[:80]!r}")
            if each > max_rank:
                raise ValueError(f"its rank is {each}, above adapters.max_rank ({max_rank})")
        for each in (alpha, *alpha_by_module.values()):
            # Python's whole numbers have no limit, and a scale that float32 cannot hold makes every product infinite.
            if isinstance(each, bool) or not isinstance(each, int | float) or not abs(each) <= _MAX_ALPHA:
                raise ValueError(f"lora_alpha is a number of at most {_MAX_ALPHA:g}, not {str(each)[:80]!r}")
        if (bias := config.get("bias", "none")) != "none":  # vLLM takes no null for it
            raise ValueError(f"bias is {str(bias)[:80]!r}, not 'none'; adapters with biases are not served")
        if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
            raise ValueError(f"init_lora_weights is {init[:80]!r}: the model's own weights would have to change too")
        if used := [feature for feature in _REFUSED_FEATURES if config.get(feature)]:
            raise ValueError(f"{used[0]} is set; only plain LoRA matrices of linear layers are served")
        return cls(rank, by_module, alpha, alpha_by_module, bool(config.get("use_rslora")))

    def of_module(self, module: str) -> int:
        rank = match_pattern(self.by_module, module)
        return self.rank if rank is None else rank

    def scale_of(self, module: str) -> float:
        alpha, rank = match_pattern(self.alpha_by_module, module), self.of_module(module)
        return abs(self.alpha if alpha is None else alpha) / (math.sqrt(rank) if self.is_stabilized else rank)


def match_pattern(pattern: Mapping[str, _Value], name: str) -> _Value | None:
    """Return the value of the first key that is `name` or the end of it after a dot, as in PEFT; None without any."""
    parts = name.split(".")
    ends = [".".join(parts[first:]) for first in range(len(parts))]
    found = [end for end in ends if end in pattern]
    if len(found) > 1:
        found = [next(key for key in pattern if key in found)]
    return pattern[found[0]] if found else None


def check_shapes(tensors: Mapping[str, tuple[str, Shape]], ranks: Ranks, base: Mapping[str, Shape]) -> None:
    """Raise ValueError unless the tensors are pairs that fit the model's weights."""
    # vLLM takes smaller matrices in silence.
    if not tensors:
        raise ValueError("it has no tensors")
    sides: dict[str, dict[str, Shape]] = {}
    for name, (dtype, shape) in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"].rpartition(".")[2] not in MODULES:
            raise ValueError(
                f"it has the tensor {name[:200]!r}; served are base_model.model.MODULE.lora_A.weight and lora_B, of "
                f"modules {', '.join(sorted(MODULES))}"
            )
        if dtype not in _DTYPE_BYTES or len(shape) != 2:
            raise ValueError(f"{name[:200]} has type {dtype[:20]} and shape {shape[:4]}, not a matrix of floats")
        sides.setdefault(match["module"], {})[match["side"]] = shape
    for module, shapes in sides.items():
        if shapes.keys() != {"A", "B"}:
            raise ValueError(f"{module[:200]} has lora_{min(shapes)} alone")
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise ValueError(f"the model has no weight {module[:200]}.weight: it is an adapter of another one")
        rank, (num_outputs, num_inputs) = ranks.of_module(module), weight
        expected = {"A": (rank, num_inputs), "B": (num_outputs, rank)}
        for side in ("A", "B"):
            if shapes[side] != expected[side]:
                raise ValueError(
                    f"{module[:200]}.lora_{side} has shape {shapes[side]}; the model and the rank {rank} need "
                    f"{expected[side]}"
                )


def check_values(file: Path, ranks: Ranks) -> None:
    """Raise ValueError for weights with which pages could hold what is no number."""
    # KV pages with NaN spoil answers of others: a kernel multiplies what an earlier request has left in a page by 0.
    from safetensors import SafetensorError, safe_open

    growths: dict[str, float] = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                values = tensors.get_tensor(name).abs()
                if not bool((values <= _MAX_WEIGHT).all()):
                    raise ValueError(f"{name[:200]} has a value that is no number, or above {_MAX_WEIGHT}")
                module = name.rpartition(".lora_")[0].removeprefix("base_model.model.")
                growths[module] = growths.get(module, ranks.scale_of(module)) * float(values.double().sum(1).max())
    except SafetensorError as error:
        raise ValueError(f"safetensors cannot read it: {str(error)[:200]}") from None
    for module, growth in growths.items():
        if growth > _MAX_GROWTH:
            raise ValueError(
                f"{module[:200]} may enlarge its input {growth:.3g} times: lora_alpha and weights give more than "
                f"{_MAX_GROWTH:g}, with which numbers of the model could become infinite"
            )


def read_header(file: Path) -> dict[str, tuple[str, Shape]]:
    """Return type and shape of each tensor. Raises ValueError for a file that is no safetensors."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError("it is no safetensors file")
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError):
            raise ValueError("its header is no JSON: it is no safetensors file") from None
    if not isinstance(header, dict) or len(header) > _MAX_TENSORS:
        raise ValueError(f"its header is no mapping of at most {_MAX_TENSORS} tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its header has __metadata__ that is no mapping of texts")
    tensors: dict[str, tuple[str, Shape]] = {}
    ranges: list[tuple[int, int]] = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            is_whole = all(map(_is_whole, (*shape, begin, stop))) and min((*shape, begin)) >= 0
        except (KeyError, TypeError, ValueError):
            is_whole = False
        if not is_whole or not isinstance(dtype, str) or stop < begin:
            raise ValueError(f"its header describes {name[:200]!r} wrongly")
        if (num_bytes := _DTYPE_BYTES.get(dtype)) is not None and math.prod(shape) * num_bytes != stop - begin:
            raise ValueError(f"its header describes {name[:200]!r} with another number of bytes than its shape has")
        tensors[name] = (dtype, shape)
        ranges.append((begin, stop))
    end = 0
    for begin, stop in sorted(ranges):
        # As safetensors: no byte belongs to two tensors, or to none.
        if begin != end:
            raise ValueError(f"its header describes tensors that overlap, or bytes of none, at {min(begin, end)}")
        end = stop
    if size != 8 + length + end:
        raise ValueError(f"it has {size} bytes, and its header {8 + length + end}: it was cut, or is another file")
    return tensors


def _located(adapter: AdapterConfig, key: str, max_bytes: int) -> Path:
    if adapter.path.startswith("/"):
        return Path(adapter.path)
    wanted = [CONFIG, WEIGHTS, *TOKENIZER_FILES]
    revision, limit = adapter.revision or None, (max_bytes, "of all adapters: adapters.max_gib")
    return from_hub(adapter.path, lambda _: None, only=wanted, revision=revision, key=key, limit=limit)


def _refuse_unserved_files(folder: Path, key: str, model_folder: Path) -> None:
    try:
        names = {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        _refuse(key, folder, error.strerror or "it cannot be read")
    if WEIGHTS not in names and (pickle := next((name for name in _PICKLES if name in names), "")):
        _refuse(key, folder / pickle, f"a pickle can run code; save the adapter as {WEIGHTS}")
    for name in TOKENIZER_FILES:
        if name in names and _vocabulary(folder / name, key) != _vocabulary(model_folder / name, key):
            _refuse(
                key,
                folder / name,
                "it differs from the model's: adapters with a tokenizer or tokens of their own are not served; "
                "remove the file if the adapter was trained with the model's",
            )


def _vocabulary(file: Path, key: str) -> object:
    try:
        with open_regular(file) as opened:
            content = opened.read(_MAX_TOKENIZER_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        _refuse(key, file, error.strerror or "it cannot be read")
    if len(content) > _MAX_TOKENIZER_BYTES:
        _refuse(key, file, f"it has more than {_MAX_TOKENIZER_BYTES} bytes")
    if file.suffix != ".json":
        return content
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if name not in _NOT_OF_THE_VOCABULARY}


def _copy(source: Path, target: Path, limit: int, key: str) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    try:
        with open_regular(source) as opened, target.open("xb") as copy:
            while piece := opened.read(_READ_BYTES):
                size += len(piece)
                if size > limit:
                    _refuse(key, source, f"it has over {limit} bytes, its limit (of all adapters: adapters.max_gib)")
                digest.update(piece)
                copy.write(piece)
    except OSError as error:
        missing = error.errno == errno.ENOENT
        _refuse(key, source, "the file is missing" if missing else error.strerror or "it cannot be copied")
    return size, digest.hexdigest()


def _read_config(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return values


def _pattern(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    values = config.get(field) or {}
    if not isinstance(values, dict) or len(values) > _MAX_PATTERNS:
        raise ValueError(f"{field} is no mapping of at most {_MAX_PATTERNS} modules")
    if bad := [key for key in values if not _PATTERN_KEY.fullmatch(key)]:
        raise ValueError(f"{field} has the key {bad[0][:80]!r}; only names of modules, or ends of names, are accepted")
    return values


def _shapes_of_model(folder: Path) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with _naming("model.path", file):
            shapes |= {name: shape for name, (_, shape) in read_header(file).items() if len(shape) == 2}
    if not shapes:
        raise ConfigError(
            f"adapters.served: {folder} has no safetensors, so shapes of adapters cannot be compared with the model's",
            param="adapters.served",
        )
    return shapes


@contextmanager
def _naming(key: str, file: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        _refuse(key, file, str(error))
    except OSError as error:
        _refuse(key, file, error.strerror or "it cannot be read")


def _refuse(key: str, file: Path, why: str) -> NoReturn:
    raise ConfigError(f"{key}: {file}: {why}", param=key)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
