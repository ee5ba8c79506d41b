"""Change one thing at a time in what decides who may do what and what proves a page, and see whether a test fails.

The last line is JSON: `mutants`, `killed`, `equivalent` and `survived`. Exit code 1 where one survived that is not in
EQUIVALENT. Changes of texts of errors and logs count as equivalent: they are read by people.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Module below services/kvferry -> the tests that have to notice.
MODULES: dict[str, tuple[str, ...]] = {
    "gateway/access.py": ("tests/unit/gateway/test_access.py",),
    "gateway/jwt_tokens.py": ("tests/unit/gateway/test_jwt_tokens.py",),
    "gateway/tenant_directory.py": ("tests/unit/gateway/test_tenant_directory.py",),
    "link/flow_control.py": ("tests/unit/link/test_flow_control.py",),
    "link/quarantine.py": ("tests/unit/link/test_quarantine.py",),
    "tenancy/limits.py": ("tests/unit/tenancy/test_limits.py",),
    "tenancy/slots.py": ("tests/unit/tenancy/test_slots.py",),
}
# Name of a mutant -> why no test can see it.
EQUIVALENT: dict[str, str] = {}

_TEXT = re.compile(r"""[frb]*(".*"|'.*')""")
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests against changed modules.")
    parser.add_argument("modules", nargs="*", default=list(MODULES), help="of services/kvferry")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        place = Path(folder)
        _prepare(place, arguments.modules)
        mutmut = [sys.executable, "-m", "mutmut"]
        subprocess.run([*mutmut, "run", "--max-children", str(arguments.jobs)], cwd=place, check=True)
        results = subprocess.run(
            [*mutmut, "results", "--all", "true"], cwd=place, check=True, capture_output=True, text=True
        )
        outcomes = dict(line.strip().split(": ", 1) for line in results.stdout.splitlines() if ": " in line)
        left = {}
        for name in (name for name, outcome in outcomes.items() if outcome not in ("killed", "timeout")):
            shown = subprocess.run(
                [*mutmut, "show", name], cwd=place, check=True, capture_output=True, text=True
            ).stdout
            if name not in EQUIVALENT and not _is_of_texts(shown):
                left[name] = shown
    for name, shown in left.items():
        print(f"\n{name}\n{shown}")
    killed = sum(outcome in ("killed", "timeout") for outcome in outcomes.values())
    equivalent = len(outcomes) - killed - len(left)
    print(json.dumps({"mutants": len(outcomes), "killed": killed, "equivalent": equivalent, "survived": len(left)}))
    return 1 if left else 0


def _prepare(place: Path, modules: list[str]) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "services" / "kvferry", place / "src" / "kvferry", ignore=ignored)
    for name in _COPIED:
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    settings = _SETTINGS.format(
        modules=json.dumps([f"src/kvferry/{module}" for module in modules]),
        copied=json.dumps([*_COPIED, "pyproject.toml"]),
        tests=json.dumps(sorted({test for module in modules for test in MODULES[module]})),
    )
    (place / "pyproject.toml").write_text(settings)


def _is_of_texts(shown: str) -> bool:
    """Return whether a difference is of texts that people read: a line that is an error's, a log's or a repr's."""
    changed = [line[1:] for line in shown.splitlines() if re.match(r"[-+](?![-+])", line)]
    return len({_TEXT.sub('""', line) for line in changed}) == 1


if __name__ == "__main__":
    sys.exit(main())
