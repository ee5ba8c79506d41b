"""A model of the hub in a folder: all of it or nothing, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvferry.engine.vllm.start.weights import MANIFEST
from kvferry.errors import ConfigError, UnavailableError
from kvferry.hub_model import download, marker
from kvferry.hub_model import fill as filling
from kvferry.hub_model import staging as staging_module
from kvferry.hub_model.__main__ import masked
from kvferry.hub_model.fill import fill
from kvferry.hub_model.listing import checked, refusal
from kvferry.hub_model.wait import wait
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


def no_pause(stopping: threading.Event, _seconds: float) -> bool:
    return stopping.is_set()


def fill_from(
    hub: Hub,
    folder: Path,
    *,
    model: str = MODEL,
    revision: str = "v1",
    token: str = "",
    pause: download.Pause = no_pause,
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


def start(hub: Hub, command: str, folder: Path, **environ: str) -> subprocess.Popen[str]:
    arguments = ["--model", MODEL, "--revision", "v1", "--folder", str(folder)]
    own = {"PATH": os.environ["PATH"], "HOME": str(folder.parent.parent), "HF_ENDPOINT": hub.url, **environ}
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry.hub_model", command, *arguments],
        env=own,
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


def test_another_process_goes_on_where_a_killed_one_was(folder: Path) -> None:
    with hub_server(dict(FILES), gate=threading.Event()) as hub:
        killed = start(hub, "fill", folder)
        parts = folder.with_name(f".{folder.name}.partial") / "parts"
        until(lambda: sum(file.stat().st_size >= 1_000_000 for file in parts.glob("*")) == 2)
        killed.kill()
        killed.communicate()
        assert not folder.exists()
        assert hub.gate is not None
        hub.gate.set()
        hub.requests.clear()
        process = start(hub, "fill", folder)
        said, faults = process.communicate()
    assert process.returncode == 0, faults
    assert_whole(folder)
    ranges = [headers["range"] for _, headers in hub.requests if "range" in headers]
    assert len(ranges) >= 2
    assert all(int(re.findall(r"\d+", each)[0]) >= 1_000_000 for each in ranges)
    assert re.search(r"MB/s", said)


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
    assert len(hub.requests) == download.MAX_FAILURES
    assert not folder.exists()


def test_a_file_that_never_comes_ends_the_try_and_keeps_the_rest(hub: Hub, folder: Path) -> None:
    hub.cut_after_bytes = 0
    with pytest.raises(UnavailableError, match=f"{download.MAX_FAILURES} tries without a new byte"):
        fill_from(hub, folder)
    hub.cut_after_bytes = None
    fill_from(hub, folder)
    assert_whole(folder)


def test_cuts_of_varying_length_without_ranges_end_the_try(folder: Path) -> None:
    files = {"a.bin": bytes(5000)}
    with hub_server(files, cut_after_bytes=2000, cut_more_bytes=(0, 1000), ignores_ranges=True) as hub:
        with pytest.raises(UnavailableError, match=f"{download.MAX_FAILURES} tries without a new byte"):
            fill_from(hub, folder)
        assert hub.num_gets("a.bin") <= 2 * download.MAX_FAILURES


def test_answers_of_a_byte_each_end_the_try(folder: Path) -> None:
    with hub_server({"a.bin": bytes(download.MAX_TRIES + 1)}, cut_after_bytes=1) as hub:
        with pytest.raises(UnavailableError, match=f"{download.MAX_TRIES} tries, the last one: .*RemoteProtocolError"):
            fill_from(hub, folder)
        assert hub.num_gets("a.bin") == download.MAX_TRIES
        fill_from(hub, folder)
    assert (folder / "a.bin").read_bytes() == bytes(download.MAX_TRIES + 1)


@pytest.mark.parametrize(("said", "expected_s"), [("7", 7), ("86400", 300), ("", None), ("-1", None), ("Wed", None)])
def test_the_hub_says_when_to_ask_again_up_to_a_limit(said: str, expected_s: int | None) -> None:
    request = httpx.Request("GET", "https://hub/a")
    response = httpx.Response(429, headers={"retry-after": said}, request=request)
    error = refusal(response, "a", endpoint="https://hub", has_token=False)
    assert isinstance(error, UnavailableError)
    assert error.retry_after_s == expected_s


def test_a_pause_that_the_hub_asks_for_is_made(folder: Path) -> None:
    pauses_s: list[float] = []

    def pause(_stopping: threading.Event, seconds: float) -> bool:
        pauses_s.append(seconds)
        return False

    with hub_server({"a.bin": b"a"}, num_unavailable=1, retry_after="7") as hub:
        fill(MODEL, "v1", folder, report=lambda _: None, endpoint=hub.url, pause=pause)
    assert pauses_s == [7]
    with hub_server({"b.bin": b"b"}, retry_after="8") as hub:
        hub.listed = lambda: setattr(hub, "num_unavailable", 1)
        fill(MODEL, "v1", folder.with_name("b"), report=lambda _: None, endpoint=hub.url, pause=pause)
    assert pauses_s == [7, 8]


def test_pauses_grow_where_the_hub_asks_for_none(folder: Path) -> None:
    pauses_s: list[float] = []

    def pause(_stopping: threading.Event, seconds: float) -> bool:
        pauses_s.append(seconds)
        return False

    with hub_server({"a.bin": b"a"}, cut_after_bytes=0) as hub, pytest.raises(UnavailableError, match="a new byte"):
        fill(MODEL, "v1", folder, report=lambda _: None, endpoint=hub.url, pause=pause)
    assert pauses_s == [1, 2, 4, 8, 16]


def test_a_listing_that_does_not_end_is_left_at_a_limit_of_bytes(hub: Hub, folder: Path) -> None:
    hub.listing_chunks = itertools.repeat(bytes(1 << 20))
    with pytest.raises(ConfigError, match=rf"{hub.url} lists {MODEL} in more than 64 MiB"):
        fill_from(hub, folder)
    assert len(hub.requests) == 1
    assert not folder.exists()


def test_a_listing_that_would_have_to_be_unpacked_is_not(hub: Hub, folder: Path) -> None:
    hub.listing_chunks, hub.listing_encoding = iter([gzip.compress(bytes(1 << 20))] * 100), "gzip"
    with pytest.raises(UnavailableError, match=rf"{hub.url} lists {MODEL} with Content-Encoding 'gzip', not asked for"):
        fill_from(hub, folder)
    assert {headers["accept-encoding"] for _, headers in hub.requests} == {"identity"}
    assert len(hub.requests) == download.MAX_FAILURES


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
    monkeypatch.setattr(filling, "LIST_TIMEOUT_S", 0.05)
    with pytest.raises(UnavailableError, match=rf"{hub.url} has not listed {MODEL} after 0\.05 s"):
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


def test_a_page_instead_of_a_file_costs_nothing_that_is_there(folder: Path) -> None:
    with hub_server({"a.bin": FILES["model-1.safetensors"]}, cut_after_bytes=1_000_000, num_cuts=1) as hub:
        hub.cut = lambda: setattr(hub, "num_pages", 3)
        fill_from(hub, folder)
        asked = [headers.get("range") for url, headers in hub.requests if "/resolve/" in url]
    assert len(asked) == 5
    # None of the pages took the place of the bytes that were there.
    assert asked[0] is None
    assert len(set(asked[1:])) == 1
    assert str(asked[1]) > "bytes=0"


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


def test_an_answer_that_is_no_listing_is_asked_again(hub: Hub, folder: Path) -> None:
    hub.listing = "none"
    with pytest.raises(UnavailableError, match="answers something else than a list of acme/tiny"):
        fill_from(hub, folder)
    assert len(hub.requests) == download.MAX_FAILURES


@pytest.mark.parametrize("path", ["model-1.safetensors", "tokenizer.json"])
def test_a_wrong_hash_is_refused(hub: Hub, folder: Path, path: str) -> None:
    hub.wrong = {path}
    with pytest.raises(ConfigError, match=re.escape(f"{path} does not have the hash that the hub says")):
        fill_from(hub, folder)
    assert hub.num_gets(path) == download.MAX_MISMATCHES
    assert not folder.exists()
    hub.wrong = set()
    fill_from(hub, folder)
    assert_whole(folder)


def test_a_fault_of_one_file_does_not_wait_for_the_others(folder: Path) -> None:
    with hub_server(dict(FILES), gate=threading.Event(), wrong={"tokenizer.json"}) as hub:
        assert hub.gate is not None
        timer = threading.Timer(0.5, hub.gate.set)
        timer.start()
        with pytest.raises(ConfigError, match=r"tokenizer\.json does not have the hash"):
            fill_from(hub, folder)
        timer.join()
        # What came of the others stays for the next try.
        parts = folder.with_name(f".{folder.name}.partial") / "parts"
        assert sum(part.stat().st_size for part in parts.glob("*.part")) < 6_000_000
    assert not folder.exists()


def test_what_a_crash_left_of_a_file_is_not_believed(hub: Hub, folder: Path) -> None:
    hub.cut_after_bytes = 0
    with pytest.raises(UnavailableError):
        fill_from(hub, folder)
    hub.cut_after_bytes = None
    parts = folder.with_name(f".{folder.name}.partial") / "parts"
    for part in parts.glob("*.part"):
        part.write_bytes(bytes(2_000_000))  # blocks that were never written
    fill_from(hub, folder)
    assert_whole(folder)


def test_what_another_listing_left_is_not_taken(folder: Path) -> None:
    old = {"model.safetensors": b"o" * 4000, "z.bin": b"o" * 5000}
    staging = folder.with_name(f".{folder.name}.partial")

    def until_other_file(stopping: threading.Event, _seconds: float) -> bool:
        # The failure of one file stops the download of the other one.
        until(lambda: any(staging.glob("tree-*/model.safetensors")))
        return stopping.is_set()

    with hub_server(old, wrong={"z.bin"}) as hub, pytest.raises(ConfigError, match="does not have the hash"):
        fill_from(hub, folder, revision="main", pause=until_other_file)
    assert [file.read_bytes() for file in staging.rglob("model.safetensors")] == [b"o" * 4000]
    (staging / "parts" / "old.part").write_bytes(b"old")
    new = {"model.safetensors": b"n" * 4000, "z.bin": b"n" * 5000}
    # The names and sizes are the same, and one file of the new listing fails, so the staging folder stays.
    with hub_server(new, wrong={"z.bin"}) as hub:
        with pytest.raises(ConfigError, match="does not have the hash"):
            fill_from(hub, folder, pause=until_other_file)
        assert [file.read_bytes() for file in staging.rglob("model.safetensors")] == [b"n" * 4000]
        assert list((staging / "parts").iterdir()) == []
        hub.wrong = set()
        fill_from(hub, folder)
        assert hub.num_gets("model.safetensors") == 1
    assert {name: (folder / name).read_bytes() for name in new} == new


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


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_an_encoded_answer_is_refused(hub: Hub, folder: Path, encoding: str) -> None:
    hub.encoding = encoding
    with pytest.raises(ConfigError, match=f"is sent with Content-Encoding '{encoding}', which was not asked for"):
        fill_from(hub, folder)
    files = [headers for url, headers in hub.requests if "/resolve/" in url]
    assert {headers["accept-encoding"] for headers in files} == {"identity"}
    assert not folder.exists()


def test_a_revision_that_is_not_there_is_named(hub: Hub, folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no revision 'v9'"):
        fill_from(hub, folder, revision="v9")
    with pytest.raises(ConfigError, match="owner/name"):
        fill_from(hub, folder, model="a/b/c")


def test_a_volume_that_is_too_small_is_refused_before_the_first_byte(hub: Hub, folder: Path) -> None:
    hub.listing = [*hub.siblings(), {"rfilename": "huge.bin", "size": 1 << 60, "blobId": "0" * 40}]
    with pytest.raises(
        ConfigError, match=r"1073741824\.01 GiB are to be downloaded, and .* free: give its volume more"
    ):
        fill_from(hub, folder)
    assert hub.num_gets("config.json") == 0


def test_a_volume_that_becomes_full_is_said_in_words(hub: Hub, folder: Path) -> None:
    code = f"""
import resource, signal, sys
from pathlib import Path
from kvferry.hub_model import fill as filling
from kvferry.hub_model import staging as staging_module
from kvferry.hub_model.fill import fill
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
fill({MODEL!r}, "v1", Path({str(folder)!r}), report=print, endpoint={hub.url!r})
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is full (File too large): give its volume more space" in ended.stderr
    fill_from(hub, folder)
    assert_whole(folder)


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
    error = download._words(OSError(number, os.strerror(number)), Path("/v"))
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


def lock_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As on file systems of a network: no locks, or locks of each node alone."""

    def flock(_descriptor: int, _operation: int) -> None:
        if kind == "none":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    kernels = itertools.count()
    monkeypatch.setattr(staging_module, "kernel", lambda: f"kernel-{next(kernels)}")


@pytest.mark.parametrize("kind", ["none", "of a node"])
def test_two_at_once_without_locks_make_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    lock_nothing(monkeypatch, kind)
    with hub_server(dict(FILES), gate=threading.Event()) as hub:
        first = Fill(hub, folder)
        until(lambda: hub.num_gets("model-1.safetensors"))
        second = Fill(hub, folder)
        until(lambda: any("another process fills the same folder" in line for line in second.said))
        assert hub.gate is not None
        hub.gate.set()
        for each in (first, second):
            each.join(60)
            assert each.error is None
        assert hub.num_gets("model-1.safetensors") == 1
    assert_whole(folder)


@pytest.mark.parametrize("kind", ["none", "of a node"])
def test_a_process_that_was_away_for_long_spoils_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lock_nothing(monkeypatch, kind)
    monkeypatch.setattr(staging_module, "STALE_S", 0.3)
    monkeypatch.setattr(staging_module, "BEAT_S", 1000)
    with hub_server(dict(FILES), gate=threading.Event()) as hub:
        slow = Fill(hub, folder)
        until(lambda: hub.num_gets("model-1.safetensors") and hub.num_gets("model-2.safetensors"))
        monkeypatch.setattr(staging_module, "BEAT_S", 0.01)
        second = Fill(hub, folder)
        until(lambda: hub.num_gets("model-1.safetensors") == 2 and hub.num_gets("model-2.safetensors") == 2)
        assert hub.gate is not None
        hub.gate.set()
        for each in (slow, second):
            each.join(60)
    assert second.error is None
    assert isinstance(slow.error, UnavailableError)
    assert "another process has taken over" in str(slow.error)
    assert_whole(folder)


def test_what_a_lost_process_writes_late_is_in_no_file_that_gets_a_name(tmp_path: Path) -> None:
    lost, ours = (staging_module.Staging(tmp_path) for _ in range(2))
    old, new = tmp_path / f"x.{lost.token}.part", tmp_path / f"x.{ours.token}.part"
    with old.open("ab") as opened:
        opened.write(b"right")
        opened.flush()
        ours.may_be_written = True
        ours.adopt(old, new)
        opened.write(b"late")
    assert new.read_bytes() == b"right"
    assert not old.exists()


@pytest.mark.parametrize("link", ["staging", "parts", "lock", "lease", "tree", "file", "subfolder", "part", "hard"])
def test_links_in_the_staging_folder_lead_nowhere(hub: Hub, folder: Path, tmp_path: Path, link: str) -> None:
    # What a try left that ended half way, and what somebody put there since.
    hub.wrong = {"model-2.safetensors"}
    with pytest.raises(ConfigError):
        fill_from(hub, folder)
    hub.wrong = set()
    staging = folder.with_name(f".{folder.name}.partial")
    (tree,) = staging.glob("tree-*")
    outside = tmp_path / "outside"
    outside.mkdir()
    kept = {"config.json": b"[]", "notes.txt": b"mine", "weights": bytes(3_000_000)}
    for name, content in kept.items():
        (outside / name).write_bytes(content)
    file = {"lock": staging / "lock", "lease": staging / "lease", "file": tree / "config.json"}.get(link)
    if file is not None:
        file.unlink(missing_ok=True)
        file.symlink_to(outside / "config.json")
    elif link in ("part", "hard"):
        for path in [*(staging / "parts").iterdir(), tree / "model-1.safetensors"]:
            path.unlink(missing_ok=True)
        sha256 = hashlib.sha256(FILES["model-1.safetensors"]).hexdigest()
        part = staging / "parts" / f"{sha256}-{hashlib.sha256(b'model-1.safetensors').hexdigest()[:16]}.part"
        if link == "part":
            part.symlink_to(outside / "notes.txt")
        else:
            part.hardlink_to(outside / "notes.txt")
    else:
        path = {"staging": staging, "parts": staging / "parts", "tree": tree, "subfolder": tree / "sub folder"}[link]
        shutil.rmtree(path)
        path.symlink_to(outside)
    fill_from(hub, folder)
    assert_whole(folder)
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == kept


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
    assert (process.returncode, faults) == (1, f"{staging}/lock: Is a directory (user {os.geteuid()})\n")


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


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", "x" * 501, marker.MARKER, "a\0b"])
def test_names_that_leave_the_folder_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be one of a folder"):
        checked(MODEL, [SimpleNamespace(rfilename=path, size=1, lfs=None, blob_id="0" * 40)])


def test_listings_have_a_limit_and_hashes() -> None:
    def listed(count: int, **changed: Any) -> list[Any]:
        entry: dict[str, Any] = {"size": 1, "lfs": None, "blob_id": "0" * 40, **changed}
        return [SimpleNamespace(rfilename=f"f{number}", **entry) for number in range(count)]

    assert len(checked(MODEL, listed(marker.MAX_FILES))) == marker.MAX_FILES
    with pytest.raises(ConfigError, match=f"at most {marker.MAX_FILES}"):
        checked(MODEL, listed(marker.MAX_FILES + 1))
    with pytest.raises(ConfigError, match="has no files"):
        checked(MODEL, [])
    with pytest.raises(ConfigError, match="cannot be verified"):
        checked(MODEL, listed(1, blob_id=None))
    with pytest.raises(ConfigError, match="cannot be verified"):
        checked(MODEL, listed(1, blob_id="/tmp/" + "0" * 35))  # hashes name files
    with pytest.raises(ConfigError, match="cannot be verified"):
        checked(MODEL, listed(1, lfs=SimpleNamespace(sha256="../" * 21 + "0")))
    for name in (7, "kvferry-manifest.json", "a\nb", "\ud800"):
        with pytest.raises(ConfigError, match="cannot be one of a folder"):
            checked(MODEL, [SimpleNamespace(rfilename=name, size=1, lfs=None, blob_id="0" * 40)])
    with pytest.raises(ConfigError, match="cannot be verified"):
        checked(MODEL, listed(1, size=None))
    for lfs in (SimpleNamespace(sha256="/tmp/outside"), SimpleNamespace(sha256="../x")):
        with pytest.raises(ConfigError, match="cannot be verified"):
            checked(MODEL, listed(1, lfs=lfs))
    with pytest.raises(ConfigError, match="twice"):
        checked(MODEL, [*listed(1), *listed(1)])


def test_a_folder_that_lost_a_file_is_not_downloaded_again_beside_itself(hub: Hub, folder: Path) -> None:
    fill_from(hub, folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is gone, and kvferry-model\.json lists it\. Move .* away"):
        fill_from(hub, folder)
