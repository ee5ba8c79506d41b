"""The synchronous client is what the tool makes of the asynchronous one."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvferry.inference.v1 import inference_pb2 as pb
from kvferry_client import AnswerStream, AsyncAnswerStream, AsyncClient, Client, NotFound, Unavailable
from kvferry_client.calls import SERVICE

ROOT = Path(__file__).resolve().parents[2]
CLIENT = Path("services/kvferry_client")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / CLIENT, tmp_path / CLIENT)
    (tmp_path / "tools").mkdir()
    for name in ("generate_client.py", "generated_pages.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # the length of lines
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tool = [sys.executable, str(folder / "tools" / "generate_client.py"), *arguments]
    return subprocess.run(tool, capture_output=True, text=True, check=False)


def test_the_committed_client_is_the_generated_one(copy: Path) -> None:
    ended = run(copy, "--check")
    assert (ended.returncode, ended.stderr) == (0, "")
    committed = (copy / CLIENT / "synchronous.py").read_text()
    (copy / CLIENT / "synchronous.py").unlink()
    assert run(copy).returncode == 0
    assert (copy / CLIENT / "synchronous.py").read_text() == committed


@pytest.mark.parametrize("name", ["asynchronous.py", "synchronous.py"])
def test_a_change_of_one_client_alone_is_found(copy: Path, name: str) -> None:
    file = copy / CLIENT / name
    file.write_text(file.read_text().replace("num_choices: int = 1", "num_choices: int = 2"))
    ended = run(copy, "--check")
    assert (ended.returncode, ended.stderr) == (
        1,
        "synchronous.py differs from asynchronous.py: run `make client`\n",
    )


def test_a_text_that_is_no_longer_there_is_named(copy: Path) -> None:
    file = copy / CLIENT / "asynchronous.py"
    file.write_text(file.read_text().replace("The client for asyncio.", "A client."))
    ended = run(copy)
    assert ended.returncode == 1
    assert "asynchronous.py has no 'The client for asyncio.' any more: change TEXTS" in ended.stderr


def test_nothing_asynchronous_is_left() -> None:
    code = (ROOT / CLIENT / "synchronous.py").read_text().partition("\n")[2].lower()
    assert not [word for word in ("async", "await", "aio", "aiter", "anext", "event loop") if word in code]


@pytest.mark.parametrize(("made", "source"), [(Client, AsyncClient), (AnswerStream, AsyncAnswerStream)])
def test_both_clients_take_the_same_arguments(made: type, source: type) -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        public = {name: each for name, each in vars(kind).items() if inspect.isfunction(each) and name[0] != "_"}
        return {name: list(inspect.signature(each).parameters) for name, each in public.items()}

    assert methods(made) == methods(source)


@pytest.fixture
def failing_endpoint() -> Iterator[str]:
    """An endpoint whose streams break after two chunks, and that has no model."""

    def stream(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateChunk]:
        yield pb.GenerateChunk()
        yield pb.GenerateChunk()
        context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is gone")

    def generate(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, "no such model")

    methods = {
        "GenerateStream": grpc.unary_stream_rpc_method_handler(
            stream, pb.GenerateRequest.FromString, pb.GenerateChunk.SerializeToString
        ),
        "Generate": grpc.unary_unary_rpc_method_handler(generate, pb.GenerateRequest.FromString),
    }
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.strip("/"), methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def test_calls_of_the_synchronous_client_fail_in_its_own_words(failing_endpoint: str) -> None:
    with Client(failing_endpoint) as client:
        with client.stream("x", model="m") as answer:
            chunks = [next(answer), next(answer)]
            with pytest.raises(Unavailable, match="the worker is gone"):
                next(answer)
        with pytest.raises(NotFound, match="no such model"):
            client.generate("x", model="m")
    assert len(chunks) == 2


async def test_calls_of_the_asynchronous_client_fail_in_its_own_words(failing_endpoint: str) -> None:
    async with AsyncClient(failing_endpoint) as client:
        async with await client.stream("x", model="m") as answer:
            chunks = [await anext(answer), await anext(answer)]
            with pytest.raises(Unavailable, match="the worker is gone"):
                await anext(answer)
        with pytest.raises(NotFound, match="no such model"):
            await client.generate("x", model="m")
    assert len(chunks) == 2


def test_generated_code_is_left_out_of_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("own = 1\n")
    for name, text in (("made.py", "# Generated from own.py.\nmade = 1\n"), ("a_pb2.py", "made = 1\n")):
        (tmp_path / name).write_text(text)
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); import structure; from pathlib import Path; "
    code += "found = structure.measure(Path(sys.argv[2])); print(json.dumps([found.num_files, found.num_lines]))"
    arguments = [sys.executable, "-c", code, str(ROOT / "tools"), str(tmp_path)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == [1, 1]
