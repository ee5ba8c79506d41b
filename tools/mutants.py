"""Change one thing at a time in what decides who may do what and what proves a page, and see whether a test fails.

    python tools/mutants.py                         all of MODULES
    python tools/mutants.py gateway/identity/access.py       one of them

The last line is JSON: `mutants`, `killed` (a test failed or hung), `equivalent` and `survived`. Exit code 1 where one
survived, or where an entry of EQUIVALENT is stale: no survivor fits it any more. Other texts in errors, logs and
`__repr__` count as equivalent, since people read them; a text that is left out does not.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SERVICES = ROOT / "services"

# Module below services -> the tests that have to notice.
MODULES: dict[str, tuple[str, ...]] = {
    "kvferry/gateway/identity/access.py": ("tests/unit/gateway/test_access.py",),
    "kvferry/gateway/identity/identification.py": ("tests/unit/gateway/test_identification.py",),
    "kvferry/gateway/identity/jwt_tokens.py": ("tests/unit/gateway/test_jwt_tokens.py",),
    "kvferry/gateway/identity/tenant_directory.py": ("tests/unit/gateway/test_tenant_directory.py",),
    "kvferry_keeper/remote/chunk_lender.py": ("tests/unit/keeper/test_chunk_lender.py",),
    "kvferry/link/flow_control.py": ("tests/unit/link/test_flow_control.py",),
    "kvferry/link/quarantine.py": ("tests/unit/link/test_quarantine.py",),
    "kvferry/proof/verdict.py": ("tests/unit/proof/test_verdict.py",),
    "kvferry/router/prices/ledger.py": ("tests/unit/router/test_ledger.py",),
    "kvferry_keeper/store/keyring.py": ("tests/unit/store/test_keyring.py",),
    "kvferry_keeper/store/chunk_quarantine.py": ("tests/unit/store/test_chunk_quarantine.py",),
    "kvferry_keeper/store/seal_counts.py": ("tests/unit/store/test_sealing_keys.py",),
    "kvferry/tenancy/limits.py": ("tests/unit/tenancy/test_limits.py",),
    "kvferry/tenancy/shares/slots.py": ("tests/unit/tenancy/test_slots.py",),
}
# Module and function -> the line as a mutant has it ("without: " and the line where it is removed) -> why no test can
# see the difference.
EQUIVALENT: dict[str, dict[str, str]] = {
    "kvferry/gateway/identity/jwt_tokens.py JwtTokens.__init__": {
        'self._seen: FileSignature | None = ""': "read only where there is a file, which sets it",
    },
    "kvferry/gateway/identity/jwt_tokens.py JwtTokens.tenant_of": {
        "self._verified.popitem(last=None)": "only its truth counts",
    },
    "kvferry/gateway/identity/jwt_tokens.py JwtTokens._verify": {
        "algorithms=None,": "PyJWT takes the key's algorithm instead, which was compared with the token's",
        "without: algorithms=[algorithm],": "the same",
    },
    "kvferry/gateway/identity/jwt_tokens.py JwtTokens._fetch": {
        'client.stream("get", url) as answer,': "httpx sends methods in upper case",
    },
    "kvferry/gateway/identity/jwt_tokens.py _file_bytes": {
        "return file.read(MAX_JWKS_BYTES + 2)": "a second byte is over the limit too",
    },
    "kvferry/gateway/identity/tenant_directory.py TenantDirectory.__init__": {
        "self._withholds_others = None  # once there were more of them: any tenant without a record may be one": (
            "only its truth counts"
        ),
    },
    "kvferry/proof/verdict.py distance": {
        "least = min(there.values(), default=+math.inf)": "as far away",
    },
    "kvferry/proof/verdict.py _mean": {
        "return sum(found) / len(found) if found else 1.0": "of a view that was not measured, where both means are it",
    },
    "kvferry/link/quarantine.py Quarantine.add": {
        "self._digest_to_end_s.popitem(last=None)": "only its truth counts",
    },
    "kvferry/link/quarantine.py QuarantineExchange.__init__": {
        "self._numbers = itertools.count(2)": "numbers only have to differ, also from 0",
    },
    "kvferry/router/prices/ledger.py WorkerAccount.__init__": {
        "self.head_since_s = None  # when the first of `prefills` began": "read only after the first one set it",
        "self.head_since_s = 1.0  # when the first of `prefills` began": "the same",
    },
    "kvferry/router/prices/ledger.py Ledger._end_arrival": {
        "flight.is_arriving = None": "only its truth counts",
    },
    "kvferry_keeper/store/keyring.py SecretsKeyring._derive": {
        "HKDF(hashes.SHA256(), SEALING_KEY_BYTES, info=info).derive(secret)": "later releases of HKDF take no salt too",
    },
    "kvferry_keeper/store/keyring.py SealingKeyFile.__init__": {
        "self._fault = None": "no error has this message",
        'self._fault = "XXXX"': "the same",
    },
    "kvferry_keeper/store/keyring.py SealingKeyFile.refresh": {
        'self._seen, self._fault = signature, "XXXX"': "no error has this message",
    },
    "kvferry_keeper/store/seal_counts.py SealCounts.__init__": {
        "self._others: Counter[str] = None": "`load` sets it before it is read",
        "self._unknown_others: list[Path] = None": "the same",
        "self._is_changed = None": "only its truth counts",
        "self._is_refused_by_drive = None": "the same",
    },
    "kvferry_keeper/store/seal_counts.py SealCounts.save": {
        "self._is_refused_by_drive = None": "only its truth counts",
    },
    "kvferry_keeper/store/seal_counts.py _replace": {
        'draft = file.with_suffix(".TMP")': "no reader of counts takes either for one",
    },
    "kvferry/tenancy/shares/slots.py _Tenant.__init__": {
        "self._peak = self._peak_before = self._period = 1": "a tenant wants at least one when it is first asked",
    },
    "kvferry/tenancy/shares/slots.py DecodeSlots.begin": {
        'known.streams[stream] = ""': "only its keys are read",
    },
    "kvferry/tenancy/shares/slots.py DecodeSlots.check": {
        "assert abs(self._filled - sum(known.filled for known in self._tenants.values())) <= 1e-6": (
            "no sum is wrong by exactly so much"
        ),
        "assert abs(self._seen_weight - sum(known.weight for known in self._tenants.values())) <= 1e-6": "the same",
    },
    "kvferry/tenancy/shares/slots.py DecodeSlots._slots_per_weight": {
        "return self.num_slots / self._seen_weight if self._seen_weight > 0 else 1.0": "no tenant has a share of it",
    },
}

_COPIED = ("bench", "docs", "tests", "tools")
_SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {modules}
also_copy = {copied}
pytest_add_cli_args = ["-p", "no:xdist"]
pytest_add_cli_args_test_selection = {tests}

[tool.pytest.ini_options]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
timeout = 300
pythonpath = ["tests", "."]
addopts = "--import-mode=importlib"
markers = ["model: ", "shared_pair: ", "vllm: ", "cluster: "]
"""
_KILLED = ("killed", "timeout")
_LOGGERS = ("log", "logger", "warnings")


class Survivor(NamedTuple):
    function: str
    line: str  # as in EQUIVALENT
    difference: str
    is_of_texts: bool


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests against changed modules.")
    parser.add_argument("modules", nargs="*", default=list(MODULES), help="below services")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if unknown := set(arguments.modules) - MODULES.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(MODULES)}")
    counts: Counter[str] = Counter(mutants=0, killed=0, equivalent=0, survived=0)
    strangers = [name for name in EQUIVALENT if name.partition(" ")[0] not in MODULES]
    num_stale = len(strangers)
    for name in strangers:
        print(f"stale: {name} is of no module that is tried")
    for module in arguments.modules:
        outcomes, survivors = _try_mutants(module, arguments.jobs)
        known = {
            (name.removeprefix(f"{module} "), line): 0
            for name, lines in EQUIVALENT.items()
            if name.startswith(f"{module} ")
            for line in lines
        }
        left = []
        for survivor in survivors:
            if (key := (survivor.function, survivor.line)) in known:
                known[key] += 1
            elif not survivor.is_of_texts:
                left.append(survivor)
        for survivor in left:
            print(f"\n{module} {survivor.function}\n{survivor.difference}")
        for (function, line), num_met in known.items():
            if not num_met:
                num_stale += 1
                print(f"stale: no survivor of {module} {function} has: {line}")
        of_module = {
            "mutants": len(outcomes),
            "killed": sum(outcome in _KILLED for outcome in outcomes.values()),
            "equivalent": len(survivors) - len(left),
            "survived": len(left),
        }
        print(f"{module}: {json.dumps(of_module)}", flush=True)
        counts.update(of_module)
    print(json.dumps(counts))
    return 1 if counts["survived"] or num_stale else 0


def _try_mutants(module: str, num_jobs: int) -> tuple[dict[str, str], list[Survivor]]:
    """Return each mutant's outcome by its name, and those that no test noticed."""
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        place = Path(folder)
        _prepare(place, module)
        mutmut = [sys.executable, "-m", "mutmut"]
        with subprocess.Popen(
            [*mutmut, "run", "--max-children", str(num_jobs)], cwd=place, stdout=subprocess.PIPE
        ) as running:
            assert running.stdout is not None
            output = _show_progress(module, iter(lambda: os.read(running.stdout.fileno(), 4096), b""))
        if running.returncode:
            sys.exit(f"{output}\nmutmut ended with exit code {running.returncode}")
        results = subprocess.run(
            [*mutmut, "results", "--all", "true"], cwd=place, check=True, capture_output=True, text=True
        )
        outcomes = dict(line.strip().split(": ", 1) for line in results.stdout.splitlines() if ": " in line)
        source = (place / "mutants" / "src" / module).read_text(encoding="utf-8")
        return outcomes, list(_survivors(source, outcomes))


def _prepare(place: Path, module: str) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SERVICES, place / "src", ignore=ignored)
    for name in _COPIED:
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    settings = _SETTINGS.format(
        modules=json.dumps([f"src/{module}"]),
        copied=json.dumps([*_COPIED, "pyproject.toml"]),
        tests=json.dumps(MODULES[module]),
    )
    (place / "pyproject.toml").write_text(settings)


def _show_progress(module: str, pieces: Iterator[bytes]) -> str:
    """Print a line whenever another tenth of the mutants was tried. Return all that mutmut printed."""
    output, tenths = b"", 0
    for piece in pieces:
        output += piece
        counts = re.findall(rb"(\d+)/(\d+)", output[-200:])
        if counts and (now := 10 * int(counts[-1][0]) // max(1, int(counts[-1][1]))) > tenths:
            tenths = now
            print(f"{module}: tried {counts[-1][0].decode()} of {counts[-1][1].decode()} mutants", flush=True)
    return output.decode(errors="replace")


def _survivors(source: str, outcomes: dict[str, str]) -> Iterator[Survivor]:
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    lines = source.splitlines()
    exceptions = _exceptions()
    for name, outcome in outcomes.items():
        if outcome in _KILLED:
            continue
        name_here = name.rsplit(".", 1)[1]
        original = functions[re.sub(r"_\d+$", "_orig", name_here)]
        mutant = functions[name_here]
        before, after = (
            [line.strip() for line in lines[node.lineno : node.end_lineno]] for node in (original, mutant)
        )  # without the line `def`, unless it goes on
        if original.args.defaults or original.args.kw_defaults:
            before.insert(0, lines[original.lineno - 1].partition("(")[2])
            after.insert(0, lines[mutant.lineno - 1].partition("(")[2])
        changes = [line for line in difflib.ndiff(before, after) if line[0] in "-+"]
        added = " ".join(line[2:] for line in changes if line[0] == "+")
        removed = " ".join(line[2:] for line in changes if line[0] == "-")
        yield Survivor(
            re.sub(r"^x_?|__mutmut_\d+$", "", name_here).replace("ǁ", ".").lstrip("."),
            added or f"without: {removed}",
            f"# {outcome}\n" + "\n".join(changes),
            _without_texts(original, exceptions) == _without_texts(mutant, exceptions),
        )


def _exceptions() -> frozenset[str]:
    """Return names of exception classes: Python's and those of kvferry.errors."""
    errors = ast.parse((SERVICES / "kvferry" / "errors.py").read_text(encoding="utf-8"))
    names = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    return frozenset(names | {node.name for node in errors.body if isinstance(node, ast.ClassDef)})


def _without_texts(function: ast.FunctionDef | ast.AsyncFunctionDef, exceptions: frozenset[str]) -> str:
    """Return a function's code with every text that people read replaced by an empty one."""
    function = copy.deepcopy(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            _empty_arguments(node.exc)
        elif isinstance(node, ast.Call) and _is_for_people(node.func, exceptions):
            _empty_arguments(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "__repr__" in function.name:
            node.value = ""
    return "\n".join(ast.dump(part) for part in (function.args, *function.body))


def _is_for_people(called: ast.expr, exceptions: frozenset[str]) -> bool:
    if isinstance(called, ast.Attribute):
        return isinstance(called.value, ast.Name) and called.value.id in _LOGGERS
    return isinstance(called, ast.Name) and called.id in exceptions


def _empty_arguments(call: ast.Call) -> None:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        _empty(argument)


def _empty(node: ast.expr) -> None:
    """Empty the texts that become a part of an argument: no keys in it, and no arguments of other calls."""
    match node:
        case ast.Constant(value=str()):
            node.value = ""
        case ast.JoinedStr(values=parts) | ast.BoolOp(values=parts):
            for part in parts:
                _empty(part)
        case ast.FormattedValue(value=inner):
            _empty(inner)
        case ast.IfExp(body=left, orelse=right) | ast.BinOp(left=left, right=right):
            _empty(left)
            _empty(right)
        case ast.Call(func=ast.Attribute(value=separator, attr="join")):
            _empty(separator)


if __name__ == "__main__":
    sys.exit(main())
