"""A model of the hub in a folder: all of it or nothing, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import gzip
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.hf_api import RepoFile

from kvferry.engine.vllm.start.weights import MANIFEST
from kvferry.errors import ConfigError, UnavailableError
from kvferry.hub_model import fill as filling
from kvferry.hub_model import hub as hub_module
from kvferry.hub_model import marker
from kvferry.hub_model.__main__ import masked, wait
from kvferry.hub_model.fill import fill, words_of_drive
from kvferry.hub_model.hub import checked
from support.child_imports import import_environment
from support.hub_server import COMMIT, MODEL, Hub, hub_server

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model-1.safetensors": random.Random(1).randbytes(3_000_000),
    "model-2.safetensors": random.Random(2).randbytes(3_000_000),
    "sub folder/notes.txt": b"",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server(dict(FILES)) as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models" / "acme--tiny--v1"


@pytest.fixture(autouse=True)
def tries_of_a_file_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    # The library keeps whole chunks of an answer that is cut, and waits a second.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))


def no_pause(_seconds: float) -> None:
    pass


def fill_from(
    hub: Hub,
    folder: Path,
    *,
    model: str = MODEL,
    revision: str = "v1",
    token: str = "",
    pause: filling.Pause = no_pause,
) -> list[str]:
    said: list[str] = []
    fill(model, revision, folder, report=said.append, endpoint=hub.url, token=token, pause=pause)
    return said


def assert_whole(folder: Path) -> None:
    assert marker.why_not_whole(folder, MODEL, "v1") == ""
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert list(folder.parent.iterdir()) == [folder]
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert names == {*FILES, marker.MARKER, MANIFEST}


def start(
    hub: Hub,
    command: str,
    folder: Path,
    *more: str,
    program: Sequence[str] = ("-m", "kvferry.hub_model"),
    preexec: Callable[[], None] | None = None,
    **environ: str,
) -> subprocess.Popen[str]:
    arguments = ["--model", MODEL, "--revision", "v1", "--folder", str(folder)]
    own = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": import_environment()["PYTHONPATH"],
        "HOME": str(folder.parent.parent),
        "HF_ENDPOINT": hub.url,
        **environ,
    }
    return subprocess.Popen(
        [sys.executable, *program, command, *arguments, *more],
        env=own,
        preexec_fn=preexec,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(condition: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_model_is_filled_once(hub: Hub, folder: Path) -> None:
    said = fill_from(hub, folder)
    assert_whole(folder)
    assert any("100 %" in line for line in said)
    written = json.loads((folder / marker.MARKER).read_text())
    assert (written["model"], written["revision"], written["commit"]) == (MODEL, "v1", COMMIT)
    num_requests = len(hub.requests)
    assert fill_from(hub, folder) == [f"{folder} holds {MODEL} at v1 already"]
    assert len(hub.requests) == num_requests


def test_answers_that_are_cut_go_on_where_they_were(hub: Hub, folder: Path) -> None:
    hub.cut_after_bytes = 1_000_000
    fill_from(hub, folder)
    assert_whole(folder)
    assert hub.num_gets("model-1.safetensors") == 3


def test_a_server_without_ranges_starts_again(hub: Hub, folder: Path) -> None:
    hub.cut_after_bytes, hub.num_cuts, hub.ignores_ranges = 1_000_000, 2, True
    fill_from(hub, folder)
    assert_whole(folder)


def test_a_hub_that_is_busy_is_asked_again_and_not_for_ever(hub: Hub, folder: Path) -> None:
    hub.num_unavailable = 4
    said = fill_from(hub, folder)
    assert_whole(folder)
    assert any("503" in line for line in said)


def test_a_hub_that_stays_away_ends_the_try(hub: Hub, folder: Path) -> None:
    hub.num_unavailable = 1000
    with pytest.raises(UnavailableError, match="503"):
        fill_from(hub, folder)
    assert len(hub.requests) == filling.MAX_FAILURES
    assert not folder.exists()


def test_a_pause_that_the_hub_asks_for_is_made(folder: Path) -> None:
    pauses_s: list[float] = []

    with hub_server({"a.bin": b"a"}, num_unavailable=1, retry_after="7") as hub:
        fill(MODEL, "v1", folder, report=lambda _: None, endpoint=hub.url, pause=pauses_s.append)
    assert pauses_s == [7]
    with hub_server({"b.bin": b"b"}, retry_after="8") as hub:
        listings = itertools.count()
        hub.listed = lambda: setattr(hub, "num_unavailable", next(listings) == 0)
        fill(MODEL, "v1", folder.with_name("b"), report=lambda _: None, endpoint=hub.url, pause=pauses_s.append)
    assert pauses_s == [7, 8]


def test_pauses_grow_where_the_hub_asks_for_none(folder: Path) -> None:
    pauses_s: list[float] = []

    with (
        hub_server({"a.bin": b"a"}, cut_after_bytes=0) as hub,
        pytest.raises(UnavailableError, match="RemoteProtocolError"),
    ):
        fill(MODEL, "v1", folder, report=lambda _: None, endpoint=hub.url, pause=pauses_s.append)
    assert pauses_s == [2, 4, 8, 16, 32]


def test_a_listing_that_does_not_end_is_left_at_a_limit_of_bytes(hub: Hub, folder: Path) -> None:
    hub.listing_chunks = itertools.repeat(bytes(1 << 20))
    with pytest.raises(ConfigError, match=rf"{hub.url} lists {MODEL} in more than 64 MiB"):
        fill_from(hub, folder)
    assert len(hub.requests) == 2
    assert not folder.exists()


def test_a_listing_that_would_have_to_be_unpacked_is_not(hub: Hub, folder: Path) -> None:
    hub.listing_chunks, hub.listing_encoding = iter([gzip.compress(bytes(1 << 20))] * 100), "gzip"
    with pytest.raises(UnavailableError, match=f"answers for {MODEL} with Content-Encoding 'gzip', not asked"):
        fill_from(hub, folder)
    assert {headers["accept-encoding"] for _, headers in hub.requests} == {"identity"}
    assert len(hub.requests) == 2 * filling.MAX_FAILURES


def test_a_listing_that_comes_a_byte_at_a_time_is_left_at_a_limit_of_time(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = threading.Event()

    class Bytes:
        """Each byte is in time, and all of them never are; a server's thread iterates for each try."""

        def __iter__(self) -> Iterator[bytes]:
            while not going_on.wait(0.01):
                yield b" "

    hub.listing_chunks = Bytes()
    monkeypatch.setattr(hub_module, "LIST_TIMEOUT_S", 0.05)
    with pytest.raises(UnavailableError, match=rf"{hub.url} lists {MODEL}, and is not done after 0\.05 s"):
        fill_from(hub, folder)
    going_on.set()


@pytest.mark.parametrize("status", [200, 401, 403, 404, 503])
def test_a_page_of_a_proxy_is_asked_again_and_not_for_ever(hub: Hub, folder: Path, status: int) -> None:
    # Four for the listing and two for the first file that is asked for.
    hub.num_pages, hub.page_status = 4, status
    hub.listed = lambda: setattr(hub, "num_pages", 2)
    said = fill_from(hub, folder)
    assert_whole(folder)
    assert any(f"answers {status} with an HTML page for {MODEL}" in line for line in said)
    hub.num_pages = 1000
    with pytest.raises(UnavailableError, match=f"127.0.0.1 answers {status} with an HTML page"):
        fill_from(hub, folder.with_name("other"))


def test_a_host_that_refuses_an_old_address_is_asked_again(folder: Path) -> None:
    with hub_server(dict(FILES), num_elsewhere_refused=3) as elsewhere, hub_server(dict(FILES)) as hub:
        hub.elsewhere_port = elsewhere.port
        fill_from(hub, folder)
        assert_whole(folder)
        elsewhere.num_elsewhere_refused = 1000
        with pytest.raises(UnavailableError, match="localhost, to which the hub leads, answers 403"):
            fill_from(hub, folder.with_name("other"))


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((401, "RepoNotFound"), "401 Unauthorized .* no token was given"),
        ((403, "GatedRepo"), "403 Forbidden .* it is gated: accept its terms on the hub"),
        ((404, "RepoNotFound"), "404 Not Found .* or there is no model of that name"),
    ],
)
def test_what_the_hub_itself_refuses_is_final(hub: Hub, folder: Path, refusal: tuple[int, str], message: str) -> None:
    hub.refusal = refusal
    with pytest.raises(ConfigError, match=message):
        fill_from(hub, folder)
    assert len(hub.requests) == 1


def test_a_hub_that_says_nothing_is_left_at_a_limit_of_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"{endpoint} does not answer: ReadTimeout"):
            fill(MODEL, "v1", folder, report=lambda _: None, endpoint=endpoint, pause=no_pause)


def test_an_answer_that_is_no_listing_is_asked_again(hub: Hub, folder: Path) -> None:
    hub.listing = "none"
    with pytest.raises(UnavailableError, match="answers something else than a list of acme/tiny"):
        fill_from(hub, folder)
    assert len(hub.requests) == 2 * filling.MAX_FAILURES


@pytest.mark.parametrize("path", ["model-1.safetensors", "tokenizer.json"])
def test_a_wrong_hash_is_refused(hub: Hub, folder: Path, path: str) -> None:
    hub.wrong = {path}
    with pytest.raises(ConfigError, match=re.escape(f"{path} does not have the hash that the hub says")):
        fill_from(hub, folder)
    assert hub.num_gets(path) == filling.MAX_MISMATCHES
    assert not folder.exists()
    hub.wrong = set()
    fill_from(hub, folder)
    assert_whole(folder)


def test_a_missing_token_is_said_and_the_token_is_never_shown(folder: Path) -> None:
    with hub_server(dict(FILES), token="hf_secret") as hub:
        process = start(hub, "fill", folder)
        said, faults = process.communicate()
        assert process.returncode == 2
        assert "the hub answers 401 Unauthorized" in faults
        assert "no token was given (HF_TOKEN)" in faults
        assert "Traceback" not in faults
        process = start(hub, "fill", folder, HF_TOKEN="hf_wrong")
        said, faults = process.communicate()
        assert process.returncode == 2
        assert "the token in HF_TOKEN is not accepted" in faults
        assert "hf_wrong" not in said + faults
        process = start(hub, "fill", folder, HF_TOKEN="hf_secret")
        said, faults = process.communicate()
        assert process.returncode == 0, faults
        assert "hf_secret" not in said + faults
    assert_whole(folder)


def test_other_hosts_do_not_get_the_token(folder: Path) -> None:
    with hub_server(dict(FILES)) as elsewhere, hub_server(dict(FILES), token="hf_secret") as hub:
        hub.elsewhere_port = elsewhere.port
        fill_from(hub, folder, token="hf_secret")
        assert len(elsewhere.requests) == 2
        assert all("authorization" not in headers for _, headers in elsewhere.requests)
    assert_whole(folder)


@pytest.mark.parametrize(
    ("endpoint", "url", "has_token"),
    [
        ("https://mirror", "https://mirror/a/b/resolve/v1/x", True),
        ("http://mirror", "https://mirror/a/b/resolve/v1/x", True),
        ("https://mirror", "http://mirror/a/b/resolve/v1/x", False),
        ("https://mirror", "https://mirror:8443/a/b/resolve/v1/x", False),
        ("https://mirror", "https://huggingface.co/a/b/resolve/v1/x", False),
    ],
)
def test_the_token_goes_to_the_endpoint_alone(endpoint: str, url: str, has_token: bool) -> None:
    request = httpx2.Request("GET", url, headers={"authorization": "Bearer hf_secret"})
    hub_module.Hub("a/b", "v1", endpoint=endpoint, token="hf_secret")._limit(request)
    assert ("authorization" in request.headers) == has_token


def test_a_proxy_of_the_environment_is_used(hub: Hub, folder: Path) -> None:
    process = start(hub, "fill", folder, HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=hub.url)
    _, faults = process.communicate()
    assert process.returncode == 0, faults
    assert all(url.startswith("http://hub.invalid/") for url, _ in hub.requests)
    assert_whole(folder)


def test_passwords_in_addresses_are_never_shown(folder: Path) -> None:
    with hub_server(dict(FILES)) as hub:
        away = hub.port
    environs = (
        {"HF_ENDPOINT": f"http://user:SECRET@{hub.url.removeprefix('http://')}", "NO_PROXY": "*"},
        {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": f"http://user:SECRET@:{away}"},
        {"HF_ENDPOINT": "ftp://user:SE@CRET@hub.invalid"},
    )
    for number, environ in enumerate(environs):
        process = start(hub, "fill", folder.with_name(str(number)), **environ)
        assert process.stdout is not None
        said = process.stdout.readline()  # of the first try
        process.kill()
        rest, faults = process.communicate()
        assert "SE" not in said + rest + faults
        assert "://" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no answer of https://user:pa@s/s@hub:1/x", "no answer of https://***@hub:1/x"),
        ("http://token@a and http://u:p@b/", "http://***@a and http://***@b/"),
        ("http://hub/a, c@d", "http://hub/a, c@d"),
    ],
)
def test_user_info_is_masked(text: str, expected: str) -> None:
    assert masked(text) == expected


def test_a_revision_that_is_not_there_is_named(hub: Hub, folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no revision 'v9'"):
        fill_from(hub, folder, revision="v9")
    with pytest.raises(ConfigError, match="owner/name"):
        fill_from(hub, folder, model="a/b/c")


def test_a_volume_that_is_too_small_is_refused_before_the_first_byte(hub: Hub, folder: Path) -> None:
    hub.listing = [*hub.tree(), {"type": "file", "path": "huge.bin", "size": 1 << 60, "oid": "0" * 40}]
    with pytest.raises(
        ConfigError, match=r"1073741824\.01 GiB are to be downloaded, and .* free: give its volume more"
    ):
        fill_from(hub, folder)
    assert hub.num_gets("config.json") == 0


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, ConfigError, "is full"),
        (errno.EDQUOT, ConfigError, "is full"),
        (errno.EACCES, ConfigError, "cannot be written by user"),
        (errno.EIO, UnavailableError, "Input/output error"),
    ],
)
def test_errors_of_drives_have_words(number: int, kind: type[Exception], words: str) -> None:
    error = words_of_drive(OSError(number, os.strerror(number)), Path("/v"))
    assert isinstance(error, kind)
    assert words in str(error)


def test_two_at_once_make_one_folder(folder: Path) -> None:
    with hub_server(dict(FILES), gate=threading.Event()) as hub:
        first = start(hub, "fill", folder)
        until(lambda: hub.num_gets("model-1.safetensors"))
        second = start(hub, "fill", folder)
        assert second.stdout is not None
        assert "another process fills the same folder" in second.stdout.readline()
        assert hub.gate is not None
        hub.gate.set()
        for process in (first, second):
            _, faults = process.communicate()
            assert process.returncode == 0, faults
        assert hub.num_gets("model-1.safetensors") == 1
    assert_whole(folder)


class Fill(threading.Thread):
    """A fill beside the test's own thread."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        super().__init__(daemon=True)
        self.hub, self.folder = hub, folder
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            fill(MODEL, "v1", self.folder, report=self.said.append, endpoint=self.hub.url, pause=no_pause)
        except BaseException as error:
            self.error = error


def test_waiting_ends_when_the_model_is_whole(hub: Hub, folder: Path) -> None:
    waiting = start(hub, "wait", folder)
    assert waiting.stdout is not None
    assert "is not there yet" in waiting.stdout.readline()
    fill_from(hub, folder)
    said, faults = waiting.communicate()
    assert waiting.returncode == 0, faults
    assert f"holds {MODEL} at v1" in said


def test_waiting_has_a_limit(folder: Path) -> None:
    with pytest.raises(UnavailableError, match=r"after 0\.01 s: .* is not there yet"):
        wait(MODEL, "v1", folder, report=lambda _: None, timeout_s=0.01)


def test_a_folder_of_something_else_is_neither_used_nor_changed(hub: Hub, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("mine")
    for call in (lambda: fill_from(hub, folder), lambda: wait(MODEL, "v1", folder, report=lambda _: None)):
        with pytest.raises(ConfigError, match="it was not filled by this command"):
            call()
    assert (folder / "config.json").read_text() == "mine"


def test_a_folder_that_gets_its_name_between_two_looks_is_whole(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_from(hub, folder)
    filled = folder.rename(folder.with_name("filled"))
    opening = Path.open

    def open_and_rename(file: Path, *arguments: Any, **options: Any) -> Any:
        try:
            return opening(file, *arguments, **options)
        except FileNotFoundError:
            if filled.exists():
                filled.rename(folder)
            raise

    monkeypatch.setattr(Path, "open", open_and_rename)
    assert marker.why_not_whole(folder, MODEL, "v1") == ""


def test_a_marker_that_points_nowhere_is_said(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / marker.MARKER).symlink_to(folder / "nowhere")
    assert "is not there yet" in marker.why_not_whole(folder, MODEL, "v1")


def test_errors_of_the_drive_are_one_line(hub: Hub, folder: Path) -> None:
    staging = folder.with_name(f".{folder.name}.partial")
    (staging / "lock").mkdir(parents=True)
    process = start(hub, "fill", folder)
    _, faults = process.communicate()
    said = f"{staging}/lock: Is a directory (user {os.geteuid()}); what is there stays for the next try\n"
    assert (process.returncode, faults) == (1, said)


@pytest.mark.parametrize("path", ["/", ".", "..", "a/.."])
def test_a_folder_without_a_name_is_a_wrong_usage(hub: Hub, folder: Path, path: str) -> None:
    process = start(hub, "fill", Path(path), HOME="/")
    _, faults = process.communicate()
    assert process.returncode == 2
    assert "has no name of its own" in faults
    assert "Traceback" not in faults
    assert hub.requests == []


def test_a_marker_is_believed_only_for_what_it_says(hub: Hub, folder: Path) -> None:
    fill_from(hub, folder)
    with pytest.raises(ConfigError, match=r"holds acme/tiny at v1 .*, not acme/tiny at v2"):
        marker.why_not_whole(folder, MODEL, "v2")
    (folder / "model-1.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"has 5 bytes, and kvferry-model\.json says 3000000"):
        marker.why_not_whole(folder, MODEL, "v1")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors is gone"):
        marker.why_not_whole(folder, MODEL, "v1")
    (folder / marker.MARKER).write_text("{")
    with pytest.raises(ConfigError, match="is no marker"):
        marker.why_not_whole(folder, MODEL, "v1")


@pytest.mark.parametrize("sizes_bytes", [{}, {"a\0b": 1}, {"\ud800": 1}])
def test_a_marker_without_files_or_with_a_name_of_none_is_refused(tmp_path: Path, sizes_bytes: dict[str, int]) -> None:
    written = {"model": MODEL, "revision": "v1", "commit": COMMIT, "sizes_bytes": sizes_bytes}
    (tmp_path / marker.MARKER).write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"lists no files, or one that cannot|is no marker"):
        marker.why_not_whole(tmp_path, MODEL, "v1")


def test_a_folder_that_lost_a_file_is_not_downloaded_again_beside_itself(hub: Hub, folder: Path) -> None:
    fill_from(hub, folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is gone, and kvferry-model\.json lists it\. Move .* away"):
        fill_from(hub, folder)


def partial_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def fail_with(hub: Hub, folder: Path, path: str = "model-2.safetensors") -> Path:
    """Leave a partial folder with all files but one. Returns the tree in it."""
    hub.wrong = {path}
    with pytest.raises(ConfigError, match="does not have the hash"):
        fill_from(hub, folder)
    hub.wrong = set()
    hub.requests.clear()
    (tree,) = partial_of(folder).glob("tree-*")
    return tree


def test_another_process_takes_the_files_that_a_killed_one_had(folder: Path) -> None:
    with hub_server(dict(FILES), gate=threading.Event()) as hub:
        assert hub.gate is not None
        killed = start(hub, "fill", folder)
        begun = {"model-1.safetensors", "model-2.safetensors"}
        until(lambda: all(hub.num_gets(path) for path in begun))
        hub.gate.set()
        until(lambda: any(partial_of(folder).glob("tree-*/*.safetensors")))
        killed.kill()
        killed.communicate()
    there = {file.name for file in partial_of(folder).glob("tree-*/*.safetensors")}
    with hub_server(dict(FILES)) as hub:
        process = start(hub, "fill", folder)
        said, faults = process.communicate()
        assert process.returncode == 0, faults
        assert not any(hub.num_gets(path) for path in there)
    assert_whole(folder)
    assert re.search(r"MB/s", said)


def test_a_file_that_never_comes_ends_the_try_and_keeps_the_rest(hub: Hub, folder: Path) -> None:
    hub.cut_after_bytes = 2_000
    with pytest.raises(UnavailableError, match=f"{hub.url} does not answer: RemoteProtocolError|has cut"):
        fill_from(hub, folder)
    hub.cut_after_bytes = None
    hub.requests.clear()
    fill_from(hub, folder)
    assert_whole(folder)
    assert not hub.num_gets("config.json")


@pytest.mark.parametrize("ignores_ranges", [True, False])
def test_answers_that_are_cut_again_and_again_end_the_try(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ignores_ranges: bool
) -> None:
    monkeypatch.setattr(hub_module, "MAX_GETS", 7)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1)
    options: dict[str, Any] = {"cut_after_bytes": 1, "ignores_ranges": ignores_ranges}
    with hub_server({"a.bin": bytes(20)}, **options) as hub:
        with pytest.raises(UnavailableError, match=rf"127\.0\.0\.1 has cut 7 answers with a file of {MODEL}"):
            fill_from(hub, folder)
        assert hub.num_gets("a.bin") == 8 * filling.MAX_FAILURES


@pytest.mark.parametrize(("said", "expected_s"), [("7", 7), ("86400", 300), ("", None), ("-1", None), ("Wed", None)])
@pytest.mark.parametrize("status", [429, 503])
def test_the_hub_says_when_to_ask_again_up_to_a_limit(status: int, said: str, expected_s: int | None) -> None:
    request = httpx2.Request("GET", "https://hub/a")
    response = httpx2.Response(status, headers={"retry-after": said}, request=request)
    with pytest.raises(UnavailableError, match=f"the hub answers {status} for a/b") as caught:
        hub_module.Hub("a/b", "v1", endpoint="https://hub", token="")._check(response)
    assert caught.value.retry_after_s == expected_s


def test_an_encoded_answer_is_refused(hub: Hub, folder: Path) -> None:
    hub.encoding = "br"
    with pytest.raises(UnavailableError, match="with Content-Encoding 'br', not asked for"):
        fill_from(hub, folder)
    assert {headers["accept-encoding"] for _, headers in hub.requests} == {"identity"}
    assert not folder.exists()


@pytest.mark.parametrize("path", ["model-1.safetensors", "tokenizer.json"])
def test_what_a_crash_left_of_a_file_is_not_believed(hub: Hub, folder: Path, path: str) -> None:
    left = fail_with(hub, folder) / path
    times = left.stat()
    left.write_bytes(bytes(len(FILES[path])))  # blocks that were never written
    os.utime(left, ns=(times.st_atime_ns, times.st_mtime_ns))
    fill_from(hub, folder)
    assert_whole(folder)


def test_what_another_revision_left_is_not_taken(hub: Hub, folder: Path) -> None:
    tree = fail_with(hub, folder)
    (tree / "old" / "er").mkdir(parents=True)
    (tree / "old" / "er" / "weights.bin").write_bytes(b"old")
    (tree.parent / "parts").mkdir()  # of a release before
    with hub_server({**FILES, "tokenizer.json": b'{"b": 1}', "old": b"a file now"}) as newer:
        fill_from(newer, folder)
    assert (folder / "tokenizer.json").read_bytes() == b'{"b": 1}'
    assert (folder / "old").read_bytes() == b"a file now"
    assert marker.why_not_whole(folder, MODEL, "v1") == ""


def test_a_mirror_that_lists_no_sizes_fills_a_folder_that_is_whole(hub: Hub, folder: Path) -> None:
    hub.lists_no_sizes = True
    fill_from(hub, folder)
    assert_whole(folder)


def test_a_mirror_without_etags_is_said_in_words(hub: Hub, folder: Path) -> None:
    hub.has_etags = False
    with pytest.raises(UnavailableError, match=f"{hub.url} does not answer: FileMetadataError: .* ETag"):
        fill_from(hub, folder)
    assert not folder.exists()


def test_the_library_s_own_files_do_not_come_with_the_model(hub: Hub, folder: Path) -> None:
    metadata = f"{COMMIT}\n{'0' * 64}\n9999999999\n".encode()
    hub.files |= {".cache/huggingface/download/config.json.metadata": metadata, ".cache/huggingface/x": b"x"}
    fill_from(hub, folder)
    assert_whole(folder)
    assert not any(".cache" in url for url, _ in hub.requests)
    with hub_server({**FILES, ".cache/other": b"o"}) as other:
        fill_from(other, folder.with_name("other"))
    assert {file.name for file in (folder.with_name("other") / ".cache").iterdir()} == {"other"}


@pytest.mark.parametrize("token", ["hf_sec\nret", "hf_sec\r\nret: x", "hf sec", "hf_s\u00e9c", "hf_sec\x7f"])
def test_a_token_with_other_characters_is_refused_and_not_shown(hub: Hub, folder: Path, token: str) -> None:
    process = start(hub, "fill", folder, HF_TOKEN=token)
    said, faults = process.communicate()
    assert process.returncode == 2
    assert faults.startswith("the token in HF_TOKEN has a line break, a blank or another character")
    assert len(faults.splitlines()) == 1
    assert "sec" not in said + faults
    assert hub.requests == []


def test_blanks_around_the_token_are_none_of_it(folder: Path) -> None:
    with hub_server(dict(FILES), token="hf_secret") as hub:
        process = start(hub, "fill", folder, HF_TOKEN=" hf_secret\n")
        _, faults = process.communicate()
    assert process.returncode == 0, faults
    assert_whole(folder)


def test_only_the_environment_gives_a_token_or_ends_the_way_to_the_hub(hub: Hub, folder: Path) -> None:
    home = folder.parent.parent
    (home / "token").write_text("hf_of_a_file")
    process = start(hub, "fill", folder, HF_HOME=str(home), HF_HUB_OFFLINE="1", HF_DEBUG="1")
    said, faults = process.communicate()
    assert process.returncode == 0, faults
    assert all("authorization" not in headers for _, headers in hub.requests)
    assert faults == ""
    assert "hf_of_a_file" not in said
    assert_whole(folder)


def test_no_error_of_a_library_shows_the_token_or_a_signature(hub: Hub, folder: Path) -> None:
    hub_of = hub_module.Hub(MODEL, "v1", endpoint=hub.url, token="hf_secret")
    with pytest.raises(UnavailableError) as caught, hub_of._in_words():
        raise httpx2.ConnectError("no way to https://cdn/x?signature=abc with hf_secret")
    assert str(caught.value) == f"{hub.url} does not answer: ConnectError: no way to https://cdn/x?... with ***"


def test_files_come_over_plain_https_whatever_their_size(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 1000)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.xet_hash = "0" * 64
    fill_from(hub, folder)
    assert_whole(folder)
    assert (constants.MAX_HTTP_DOWNLOAD_SIZE, constants.HF_HUB_DISABLE_XET) == (1000, False)


def test_only_a_process_that_downloads_imports_the_library(hub: Hub, folder: Path) -> None:
    code = f"""
import sys
from pathlib import Path
import kvferry.hub_model.__main__
if sys.argv[1] == "wait": import kvferry.app
from kvferry.hub_model.fill import fill
from kvferry.hub_model.__main__ import wait
def has_library(): print(any(name.startswith(("huggingface_hub", "httpx2")) for name in sys.modules))
def run(): fill({MODEL!r}, "v1", Path({str(folder)!r}), report=lambda _: None, endpoint={hub.url!r})
if sys.argv[1] == "fill": run()
wait({MODEL!r}, "v1", Path({str(folder)!r}), report=lambda _: None)
if sys.argv[1] == "again": run()
has_library()
"""
    for step, expected in (("fill", "True"), ("wait", "False"), ("again", "False")):
        ended = subprocess.run(
            [sys.executable, "-c", code, step], capture_output=True, text=True, env=import_environment(), check=False
        )
        assert (ended.stdout, ended.returncode) == (f"{expected}\n", 0), ended.stderr


def test_a_volume_that_becomes_full_is_said_in_words(hub: Hub, folder: Path) -> None:
    process = start(hub, "fill", folder, preexec=lambda: limit_file_size(1_000_000))
    _, faults = process.communicate()
    assert process.returncode == 2
    assert (
        faults == f"{partial_of(folder)} is full (File too large): give its volume more space, and start this again\n"
    )
    fill_from(hub, folder)
    assert_whole(folder)


def limit_file_size(num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


# As on file systems of a network: no locks, or locks of each node alone.
_WITHOUT_LOCKS = """
import errno, fcntl, sys
from kvferry.hub_model.__main__ import main
kind = sys.argv.pop()
def flock(descriptor, operation):
    if kind == "none":
        raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
sys.exit(main())
"""


@pytest.mark.parametrize("kind", ["none", "of a node"])
def test_two_at_once_without_locks_spoil_nothing(folder: Path, kind: str) -> None:
    with hub_server(dict(FILES), gate=threading.Event()) as hub:
        assert hub.gate is not None
        begun = ("model-1.safetensors", "model-2.safetensors")
        processes = []
        for number in (1, 2):
            processes.append(start(hub, "fill", folder, kind, program=("-c", _WITHOUT_LOCKS)))
            until(lambda number=number: all(hub.num_gets(path) == number for path in begun))
        hub.gate.set()
        for process in processes:
            said, faults = process.communicate()
            assert process.returncode == 0 or (process.returncode == 1 and len(faults.splitlines()) == 1)
            assert ("this file system has no locks" in said) == (kind == "none")
        hub.num_unavailable = 1000
        assert fill_from(hub, folder) == [f"{folder} holds {MODEL} at v1 already"]
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert not any(".cache" in str(file) for file in folder.rglob("*"))


def test_a_process_that_waits_says_so_again_and_again(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "REPORT_S", 0)
    partial_of(folder).mkdir(parents=True)
    with (partial_of(folder) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = Fill(hub, folder)
        until(lambda: sum("another process fills the same folder" in line for line in waiting.said) >= 2)
    waiting.join(60)
    assert waiting.error is None
    assert_whole(folder)


def test_a_lock_whose_folder_vanishes_is_opened_again(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2]
    sweep = filling._sweep

    def vanish(partial: Path) -> None:
        sweep(partial)
        if left[0]:
            left[0] -= 1
            shutil.rmtree(partial)  # as by a process that is done

    monkeypatch.setattr(filling, "_sweep", vanish)
    fill_from(hub, folder)
    assert left == [0]
    assert_whole(folder)
    left[0] = filling.MAX_OPENS
    with pytest.raises(UnavailableError, match=f"lock was removed {filling.MAX_OPENS} times"):
        fill_from(hub, folder.with_name("other"))


def test_a_file_that_vanishes_later_does_not_start_all_again(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def missing(tree: Path) -> None:
        tries.append(tree)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(tree / "x"))

    monkeypatch.setattr(filling, "write_manifest", missing)
    with pytest.raises(UnavailableError, match=r"x: No such file or directory"):
        fill_from(hub, folder)
    assert len(tries) == 1


def test_a_lock_that_was_removed_meanwhile_is_not_believed(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for = filling._wait_for
    locked: list[int] = []

    def removed(descriptor: int, report: filling.Report) -> None:
        wait_for(descriptor, report)
        locked.append(os.fstat(descriptor).st_ino)
        if len(locked) == 1:
            # The process that had it was done, and the folder was moved away since.
            (partial_of(folder) / "lock").rename(folder.parent.parent / "removed")

    monkeypatch.setattr(filling, "_wait_for", removed)
    fill_from(hub, folder)
    assert len(set(locked)) == 2
    assert_whole(folder)


@pytest.mark.parametrize("link", ["staging", "lock", "tree", "file", "subfolder", "hard", "metadata", "pipe"])
def test_links_and_pipes_in_the_partial_folder_lead_nowhere(hub: Hub, folder: Path, tmp_path: Path, link: str) -> None:
    # In what a try left that ended half way.
    tree = fail_with(hub, folder)
    staging = tree.parent
    outside = tmp_path / "outside"
    outside.mkdir()
    kept = {"config.json": b"{}", "notes.txt": b"mine", "weights": bytes(3_000_000)}
    for name, content in kept.items():
        (outside / name).write_bytes(content)
    paths = {
        "staging": staging,
        "lock": staging / "lock",
        "tree": tree,
        "subfolder": tree / "sub folder",
        "metadata": tree / ".cache",
    }
    path = paths.get(link, tree / "config.json")
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if link == "hard":
        path.hardlink_to(outside / "config.json")
    elif link == "pipe":
        for pipe in (path, staging / "lock", tree / ".cache" / "huggingface" / "download" / "config.json.lock"):
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
    else:
        path.symlink_to(outside / "config.json" if link in ("lock", "file") else outside)
    fill_from(hub, folder)
    assert_whole(folder)
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == kept
    assert {path.stat().st_nlink for path in outside.iterdir()} == {1}


def test_a_marker_that_cannot_be_read_ends_the_fill_in_words(hub: Hub, folder: Path) -> None:
    (folder / marker.MARKER).mkdir(parents=True)
    process = start(hub, "fill", folder)
    _, faults = process.communicate()
    assert process.returncode == 1
    assert f"{folder} has a {marker.MARKER}, and another folder cannot take its place" in faults
    assert "cannot be read: Is a directory" in faults
    assert len(faults.splitlines()) == 1
    assert hub.requests == []


def listed(path: Any = "a", **changed: Any) -> RepoFile:
    return RepoFile(**{"path": path, "size": 1, "oid": "0" * 40, **changed})


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "",
        "x" * 501,
        "a\0b",
        7,
        "a\nb",
        "\ud800",
        ".cache",
        marker.MARKER,
        MANIFEST,
    ],
)
def test_names_that_leave_the_folder_are_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be one of a folder"):
        checked(MODEL, [listed(path)])


@pytest.mark.parametrize("endpoint", ["https://hub", "https://mirror/api/hub"])
def test_only_listings_have_limits(endpoint: str) -> None:
    files = ("a/b/resolve/v1/model.safetensors", "api/resolve-cache/models/a/b/v1/config.json")
    for path, has_limits in (("api/models/a/b/tree/v1", True), *((file, False) for file in files)):
        stream = httpx2.ByteStream(b"")
        response = httpx2.Response(200, stream=stream, request=httpx2.Request("GET", f"{endpoint}/{path}"))
        hub_module.Hub("a/b", "v1", endpoint=endpoint, token="")._check(response)
        assert (response.stream is not stream) == has_limits


def test_a_listing_of_folders_without_end_is_left(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_FILES", 10)
    hub.listing = [{"type": "directory", "path": f"d{number}", "oid": "0" * 40} for number in range(20)] + hub.tree()
    with pytest.raises(ConfigError, match=f"{MODEL} has more than 20 files and folders"):
        fill_from(hub, folder)


def test_listings_have_a_limit_and_hashes() -> None:
    files = [listed(f"f{number}") for number in range(marker.MAX_FILES + 1)]
    assert len(checked(MODEL, files[:-1])) == marker.MAX_FILES
    with pytest.raises(ConfigError, match=f"more than {marker.MAX_FILES}"):
        checked(MODEL, files)
    for none in ([], [listed(".cache/huggingface/x")]):
        with pytest.raises(ConfigError, match="has no files"):
            checked(MODEL, none)
    lfs = {"size": 1, "pointerSize": 1}
    for changed in (
        {"oid": None},
        {"oid": ""},
        {"oid": "g" * 40},
        {"size": -1},
        {"size": "1"},
        {"lfs": {**lfs, "oid": None}},
        {"lfs": {**lfs, "oid": "0" * 40}},
    ):
        with pytest.raises(ConfigError, match="cannot be verified"):
            checked(MODEL, [listed(**changed)])
    assert checked(MODEL, [listed(size=None)])
    with pytest.raises(ConfigError, match="twice"):
        checked(MODEL, [listed(), listed()])
