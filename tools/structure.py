"""Sizes of kvferry's sources, and the files that a request passes.

    make structure                  a table, the ten largest, and one JSON line
    make structure ARGS="--check"   exit code 1 if a limit is exceeded
    make structure ARGS="--json"    one JSON object, and nothing else

Generated code is left out. `files` and lines are of the core's wheel; the limits hold for its satellites too.

The files of a request are those that a reader opens to follow one: the files that hand it on, and the files in which it
changes its form. The first are measured: streamed chats are sent through a simulated cluster in this process (one
gateway, one prefill and one decode worker), and a file counts if one of its functions is on the stack when a transport
or the engine is reached (HANDOVERS). The second are listed (CHANGES); each has to be called meanwhile. What an engine
does inside is left out. `files_called` counts every file of which each of them calls a function, the simulated
engine, statistics and residency included, except for the leaves of the import contract (configuration, errors, tracing,
...).
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import logging
import math
import re
import sys
import tokenize
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, get_args

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

import kvferry
from kvferry.config import ClusterConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "services" / "kvferry"

# What `--check` enforces; the figure that must not be exceeded.
LIMITS = {
    "functions_over_60": 0,
    "largest_class": 400,
    "readme_words": 900,
    "files_of_a_request": 20,
    # What grew while only the figures above had limits. They go down with the code, and never up.
    "files": 280,
    "lines": 44_460,
    "docstring_words": 34_196,  # a share of the lines would rise where code goes
    "root_modules": 6,
    "most_files_in_a_package": 16,
    "settings": 184,
    "files_called": 66,
}
_LONG_FUNCTION = 60
_NUM_PASSAGES = 5  # what only one of these requests calls belongs to a heartbeat, or to a queue on a busy machine

# Files whose functions pass a request, or a part of its answer, to another process, to the engine, or to the client.
HANDOVERS = (
    "gateway/http/uvicorn_connection.py",
    "link/frame_connection.py",
    "link/frame_server.py",
    "kvferry_sim/engine.py",
)
# Files in which a request changes its form, and into what.
CHANGES = {
    "gateway/admission.py": "an admitted request",
    "gateway/bodies/openai_bodies.py": "validated fields",
    "kvferry_sim/renderer.py": "tokens (with vLLM: engine/vllm/rendering/renderer.py)",
    "router/priced_placement.py": "a placement",
    "router/prices/pricing.py": "the prices behind it",
    "link/codec.py": "messages to and from a worker",
    "gateway/http/openai_responses.py": "the bytes of an answer",
}
_INSIDE_THE_ENGINE = "kvferry_sim/"
# Functions of HANDOVERS that hand no request on: workers call them periodically.
_READINGS = {"check_health", "stats"}


@dataclass
class Sizes:
    """Counts over a tree of Python files; lists hold (lines, name), largest first."""

    num_files: int = 0
    num_lines: int = 0
    num_functions: int = 0
    code_lines: int = 0
    docstring_words: int = 0
    comment_words: int = 0
    functions: list[tuple[int, str]] = field(default_factory=list)
    classes: list[tuple[int, str]] = field(default_factory=list)


def measure(package: Path) -> Sizes:
    sizes = Sizes()
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "_pb2" in file.name or text.startswith("# Generated"):
            continue
        sizes.num_files += 1
        sizes.num_lines += len(text.splitlines())
        docstring_lines: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if docstring := ast.get_docstring(node):
                first = node.body[0]
                docstring_lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
                sizes.docstring_words += len(docstring.split())
            if isinstance(node, ast.Module):
                continue
            entry = ((node.end_lineno or 0) - node.lineno + 1, f"{file.relative_to(package)}:{node.name}")
            if isinstance(node, ast.ClassDef):
                sizes.classes.append(entry)
            else:
                sizes.num_functions += 1
                sizes.functions.append(entry)
        with file.open("rb") as source:
            for token in tokenize.tokenize(source.readline):
                if token.type == tokenize.COMMENT:
                    sizes.comment_words += len(token.string.lstrip("#").split())
        sizes.code_lines += sum(
            bool(line.strip()) and not line.strip().startswith("#") and number not in docstring_lines
            for number, line in enumerate(text.splitlines(), 1)
        )
    sizes.functions.sort(reverse=True)
    sizes.classes.sort(reverse=True)
    return sizes


def leaves() -> set[str]:
    """Return the modules on the lowest line of the import contract, and generated packages."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["kvferry"])
    return set(layers[-1].replace(" ", "").split(":"))


@dataclass
class Passage:
    """Files of one request, in the order of their first call."""

    called: dict[str, None] = field(default_factory=dict)
    handing_on: dict[str, None] = field(default_factory=dict)

    def files(self) -> list[str]:
        """Raises LookupError for an entry of CHANGES or HANDOVERS that was not called."""
        if missing := {*CHANGES, *HANDOVERS} - self.called.keys():
            raise LookupError(f"a request does not pass {', '.join(sorted(missing))}: correct CHANGES or HANDOVERS")
        return [
            name
            for name in self.called
            if name in CHANGES
            or name in HANDOVERS
            or (name in self.handing_on and not name.startswith(_INSIDE_THE_ENGINE))
        ]


async def follow_a_request() -> Passage:
    """Send a streamed chat through a simulated cluster."""
    import httpx

    from kvferry import config as configuration
    from kvferry.gateway.lifecycle import GatewayHost
    from kvferry.link import frames
    from kvferry.membership.base import MemberKind
    from kvferry.worker.lifecycle import WorkerHost, build_engine
    from kvferry_sim.membership import MemoryMembership, MemoryRegistry

    config = configuration.parse(
        {
            "model": {"path": "sim-model"},
            "engine": {"kind": "sim", "block_size": 16},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
            "gateway": {"http_port": 0, "grpc_port": 0, "placement": "priced"},
        }
    )
    frames.TURN_S = math.inf  # each call takes longer while it is recorded, and payloads would wait for another turn
    registry = MemoryRegistry()
    hosts: list[Any] = [
        WorkerHost(config, kind, build_engine(config, kind, "sim-model"), MemoryMembership(registry), heartbeat_s=14.0)
        for kind in (MemberKind.PREFILL, MemberKind.DECODE)
    ]
    gateway = GatewayHost(config, "sim-model", MemoryMembership(registry))
    hosts.append(gateway)
    body = {
        "model": "sim-model",
        "messages": [{"role": "user", "content": "word " * 400}],
        "max_tokens": 4,
        "stream": True,
    }
    try:
        for host in hosts:
            await host.start()
        while len(gateway.readiness().members) < 2:  # noqa: ASYNC110  a poll in a tool
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=600) as client:
            debug = {"x-kvferry-debug": "disaggregate"}
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()  # connections are open now
            passages = []
            for _ in range(_NUM_PASSAGES):
                passages.append(Passage())
                sys.setprofile(_recorder(passages[-1]))
                try:
                    (await client.post("/v1/chat/completions", json=body, headers=debug)).raise_for_status()
                finally:
                    sys.setprofile(None)
    finally:
        for host in reversed(hosts):
            await host.stop()
    return Passage(_of_all([each.called for each in passages]), _of_all([each.handing_on for each in passages]))


def _of_all(files: list[dict[str, None]]) -> dict[str, None]:
    excluded = leaves()
    common = set.intersection(*map(set, files))
    common = {name for name in common if name.partition("/")[0].removesuffix(".py") not in excluded}
    return {name: None for name in files[0] if name in common}


def _name_of(file: str) -> str:
    """Return the path below `services/kvferry/` or `services/`; empty for other files."""
    services = f"{PACKAGE.parent}/"
    return file.removeprefix(services).removeprefix("kvferry/") if file.startswith(services) else ""


def _recorder(passage: Passage) -> Any:
    def record(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not (name := _name_of(frame.f_code.co_filename)):
            return
        passage.called.setdefault(name)
        if name in HANDOVERS:
            callers = [
                caller.f_code for caller, _ in traceback.walk_stack(frame) if _name_of(caller.f_code.co_filename)
            ]
            if not _READINGS.intersection(caller.co_name for caller in callers):
                for caller in callers:
                    passage.handing_on.setdefault(_name_of(caller.co_filename))

    return record


def figures(sizes: Sizes, core: Sizes, passage: Passage) -> dict[str, Any]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return {
        "files": core.num_files,
        "lines": core.num_lines,
        "code_lines": core.code_lines,
        "satellites_lines": sizes.num_lines - core.num_lines,
        "functions": sizes.num_functions,
        "functions_over_60": sum(lines > _LONG_FUNCTION for lines, _ in sizes.functions),
        "largest_class": sizes.classes[0][0],
        "docstring_words": sizes.docstring_words,
        "comment_words_per_100": round(100 * sizes.comment_words / sizes.code_lines),
        "readme_words": len(re.findall(r"\S+", readme)),
        "files_of_a_request": len(passage.files()),
        "packages_of_a_request": len({name.partition("/")[0] for name in passage.files()}),
        "files_called": len(passage.called),
        "root_modules": len(list(PACKAGE.glob("*.py"))),
        "most_files_in_a_package": max(len(list(folder.glob("*.py"))) for folder in (PACKAGE, *PACKAGE.rglob("*/"))),
        "settings": num_settings(ClusterConfig),
    }


def num_settings(section: type[BaseModel]) -> int:
    """Settings of a section and of those in it; a list or mapping of sections counts once."""
    inner = [_sections_in(each.annotation) for each in section.model_fields.values()]
    return sum(sum(map(num_settings, sections)) if sections else 1 for sections in inner)


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for each in get_args(annotation) for section in _sections_in(each)]


def exceeded(results: dict[str, Any]) -> Iterator[str]:
    for name, limit in LIMITS.items():
        if results[name] > limit:
            yield f"{name} is {results[name]}, at most {limit} is allowed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    sizes, core = measure(PACKAGE.parent), measure(PACKAGE)
    if Path(kvferry.__file__).parent != PACKAGE:
        print(f"{sys.executable} imports kvferry from {Path(kvferry.__file__).parent}, not {PACKAGE}", file=sys.stderr)
        return 2
    results = figures(sizes, core, passage := asyncio.run(follow_a_request()))
    console = Console(stderr=True)
    if not arguments.check and not arguments.json:
        table = Table("", "figure", "at most")
        for name, value in results.items():
            table.add_row(name.replace("_", " "), str(value), str(LIMITS.get(name, "")))
        console.print(table)
        for title, entries in (("largest classes", sizes.classes), ("longest functions", sizes.functions)):
            console.print(f"[bold]{title}[/]: " + ", ".join(f"{name} {lines}" for lines, name in entries[:10]))
        console.print("[bold]files that a request passes[/]: " + ", ".join(passage.files()))
    print(json.dumps(results))
    faults = list(exceeded(results))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if arguments.check and faults else 0


if __name__ == "__main__":
    sys.exit(main())
