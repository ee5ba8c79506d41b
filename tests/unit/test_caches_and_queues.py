"""docs/contributor/caches-and-queues.md names each cache and queue that content of requests passes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "services" / "kvferry"
KEEPER = ROOT / "services" / "kvferry_keeper"  # named from `services`
PAGE = ROOT / "docs" / "contributor" / "caches-and-queues.md"
FOLDERS = (
    *("arguments", "engine", "gateway", "keeper", "link", "observability", "pages", "proof", "router"),
    *("tenancy", "util", "worker"),
)
KINDS = {
    *("OrderedDict", "deque", "Queue", "SimpleQueue", "PriorityQueue", "LifoQueue", "Semaphore", "BoundedSemaphore"),
    *("FairTurns", "ThreadPoolExecutor", "DeepThreads", "lru_cache", "cache", "SnapshotQueue"),
}


def _name_of(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else None


def _names_of(call: ast.expr) -> Iterator[str]:
    yield from filter(None, map(_name_of, ast.walk(call)))


def _found_in(file: Path) -> Iterator[str]:
    """Yield `Class.attribute`, `function`, or `name`."""

    def visit(node: ast.AST, owner: str, *, in_function: bool = False) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{child.name}.")
                continue
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = {name for each in child.decorator_list for name in (*_names_of(each), ast.unparse(each))}
                if decorators & {*KINDS, "functools.cache", "functools.lru_cache"}:
                    yield f"{owner}{child.name}"
            if isinstance(child, ast.Assign | ast.AnnAssign) and child.value is not None:
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                # A variable of a function ends with its call, unless it is put somewhere, as by `setdefault`.
                ends = in_function and isinstance(target, ast.Name) and _name_of(child.value) in KINDS
                if isinstance(target, ast.Attribute | ast.Name) and KINDS & set(_names_of(child.value)) and not ends:
                    yield f"{owner}{target.attr if isinstance(target, ast.Attribute) else target.id}"
            yield from visit(child, owner, in_function=in_function or is_function)

    return visit(ast.parse(file.read_text()), "")


def _found() -> set[str]:
    files = [*PACKAGE.glob("*.py"), *(file for folder in FOLDERS for file in (PACKAGE / folder).rglob("*.py"))]
    named = {file: file.relative_to(PACKAGE) for file in files}
    named |= {file: file.relative_to(KEEPER.parent) for file in KEEPER.rglob("*.py")}
    return {f"{path}:{name}" for file, path in named.items() for name in _found_in(file)}


def _rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_cache_and_queue_has_a_row_and_each_row_is_in_the_code() -> None:
    named = [name for row in _rows() for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(named) == len(set(named))
    assert set(named) == _found()


def _rows_of_libraries() -> list[list[str]]:
    lines = PAGE.read_text().partition("## What libraries keep")[2].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")][1:]


def test_each_row_that_tenants_share_names_tests_that_are_there() -> None:
    shared = [row for row in _rows() if len(row) == 5]
    libraries = _rows_of_libraries()
    assert len(shared) > 10
    assert len(libraries) > 4
    for row in (*shared, *libraries):
        assert len(row) == 5, row
        assert all(row), row
        tests = re.findall(r"`(tests/[^`]+)::(\w+)`", row[4])
        assert tests, row
        for path, name in tests:
            assert re.search(rf"^\s*(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)


def test_the_search_finds_what_a_module_may_write() -> None:
    source = """
import functools
class A:
    kept: "OrderedDict[int, int]" = field(default_factory=dict)
    def __init__(self):
        self._line: deque[int] = collections.deque()
        self._calls = functools.lru_cache(7)(self._make)
        self._typed = OrderedDict[int, str]()
        self._plain = {}
        line = self._lines.setdefault(1, deque())
        others = deque(self._line)
    @functools.cache
    def made(self): ...
@lru_cache(maxsize=3)
def name(): ...
turns = asyncio.Semaphore(2)
"""
    file = Path(__file__).with_suffix(".none")
    found = _found_in(type("File", (), {"read_text": lambda _: source})())  # type: ignore[arg-type]
    assert sorted(found) == ["A._calls", "A._line", "A._typed", "A.line", "A.made", "name", "turns"]
    assert not file.exists()
