"""The client beside a keeper that does as the test says."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvferry.keeper import messages
from kvferry.keeper.client import AWAY, SKIPPED, JobDone, KeeperClient, Region
from kvferry.keeper.client_jobs import ClientJob, ClientJobs
from kvferry.keeper.layout import ChunkKey
from kvferry.tenancy.namespace import Namespace
from support.tier_rows import Rows, key_of, layout_of, rows_of
from support.waiting import wait_until

LAYOUT = layout_of()
TENANT = Namespace("acme", 3)


class Connection:
    """The keeper's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(10)
        self._reader = messages.FrameReader()
        self._messages: list[messages.ToKeeper] = []
        self.fd = -1

    def read(self) -> messages.ToKeeper:
        while not self._messages:
            data, fds, _, _ = socket.recv_fds(self.socket, 65536, 4)
            if fds:
                (self.fd,) = fds
            if not data:
                raise EOFError
            self._messages += [messages.decode_to_keeper(payload) for payload in self._reader.feed(data)]
        return self._messages.pop(0)

    def say(self, *answers: messages.ToEngine) -> None:
        self.socket.sendall(b"".join(map(messages.encode, answers)))

    def welcome(self, keys: Sequence[ChunkKey] = ()) -> messages.Hello:
        hello = self.read()
        assert isinstance(hello, messages.Hello)
        self.say(messages.Welcome("k", messages.PROTOCOL), messages.SnapshotKeys(0, 0, 1, b"".join(keys)))
        return hello

    def close(self) -> None:
        self.socket.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Keeper:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(10)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connections: list[Connection] = []

    def accept(self) -> Connection:
        connection = Connection(self._listener.accept()[0])
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        self._listener.close()
        self.path.unlink(missing_ok=True)
        for connection in self._connections:
            connection.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    with contextlib.closing(Keeper(tmp_path / "keeper.sock")) as keeper:
        yield keeper


@pytest.fixture
def rows() -> Iterator[Rows]:
    with rows_of(64) as rows:
        yield rows


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most keepers here never say Bye."""
    monkeypatch.setattr("kvferry.keeper.client_thread._GOODBYE_TIMEOUT_S", 0.05)


@contextlib.contextmanager
def client_of(path: Path, rows: Rows, **options: object) -> Iterator[KeeperClient]:
    client = KeeperClient(str(path), rows.region, LAYOUT, engine_id="e", **options)  # type: ignore[arg-type]
    client.start()
    try:
        yield client
    finally:
        client.stop()


def one(client: KeeperClient) -> JobDone:
    done: list[JobDone] = []

    def came() -> bool:
        done.extend(client.finished())
        return bool(done)

    wait_until(came)
    (only,) = done
    return only


def test_the_region_is_handed_over(keeper: Keeper, rows: Rows) -> None:
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        hello = connection.welcome()
        assert (hello.engine_id, hello.num_rows, hello.row_bytes) == ("e", 64, 8192)
        assert hello.layout == LAYOUT.to_json()
        assert os.fstat(connection.fd).st_ino == os.fstat(rows.fd).st_ino
        wait_until(lambda: client.connected)


def test_the_mirror_is_a_snapshot_and_what_changed_since(keeper: Keeper, rows: Rows) -> None:
    a, b, c, d = map(key_of, range(4))
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.read()
        assert not client.contains(a)
        connection.say(messages.Welcome("k", 1), messages.SnapshotKeys(5, 0, 2, a + b))
        wait_until(lambda: client.connected)
        assert not client.contains(a), "half a snapshot is none"
        connection.say(messages.SnapshotKeys(5, 1, 2, c))
        wait_until(lambda: client.contains(c))
        assert client.contains(a)
        connection.say(messages.ChangedKeys(6, d, a + b))
        wait_until(lambda: client.contains(d))
        assert not client.contains(a)
        assert not client.contains(b)
        # The keeper could not tell it everything, and begins anew.
        connection.say(messages.SnapshotKeys(9, 0, 1, a))
        wait_until(lambda: client.contains(a))
        assert not client.contains(d)
        assert client.stats.hits > 0
        assert client.stats.misses > 0


def test_jobs_go_out_and_come_back_once(keeper: Keeper, rows: Rows) -> None:
    a, b, c = map(key_of, range(3))
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.welcome([a, b])
        wait_until(lambda: client.contains(b))
        client.store(1, TENANT, [(c, 77, 9)])
        assert connection.read() == messages.Store(1, "acme", 3, c, [77], [9])
        client.load(2, TENANT, [(a, 0), (b, 1), (c, 2)], {c: "volume-x"})
        assert connection.read() == messages.Load(2, "acme", 3, a + b + c, [0, 1, 2], {"volume-x": [2]})
        client.touch([a, b])
        assert connection.read() == messages.Touch(a + b)
        assert client.has_unfinished
        assert not client.wait_idle(0)
        connection.say(messages.Done(2, {1: "corrupt_payload"}, 2 * 8192))
        done = one(client)
        assert (done.job, done.is_load, done.num_bytes) == (2, True, 2 * 8192)
        assert done.succeeded == {a, c}
        assert done.failed == {b: "corrupt_payload"}
        assert not client.contains(b), "a failed chunk is not found again"
        assert client.contains(a)
        connection.say(messages.Done(1, {}, 8192))
        assert client.wait_idle(10)
        assert [done.job for done in client.finished()] == [1]
        assert not client.finished()
        assert not client.has_unfinished
        client.load(2, TENANT, [(a, 0)])  # a number whose job has ended is free


def test_while_nobody_is_there_everything_fails_at_once(tmp_path: Path, rows: Rows) -> None:
    with client_of(tmp_path / "nobody.sock", rows) as client:
        client.store(1, TENANT, [(key_of(0), 0, 0)])
        client.load(2, TENANT, [(key_of(0), 0)])
        client.touch([key_of(0)])
        done = client.finished()
        assert [(each.job, each.failed) for each in done] == [(1, {key_of(0): AWAY}), (2, {key_of(0): AWAY})]
        assert client.wait_idle(0)


def test_a_closed_client_takes_no_job_again() -> None:
    jobs = ClientJobs(time.monotonic)
    jobs.open()
    jobs.close()
    jobs.open()  # by the thread, which has not seen the end yet
    store = messages.Store(7, TENANT.tenant, TENANT.epoch, key_of(1), [0], [0])
    assert not jobs.submit(ClientJob(7, [key_of(1)], store, 64, 0.0))
    assert [(done.job, done.failed) for done in jobs.pop_done()] == [(7, {key_of(1): AWAY})]


def test_an_empty_job_ends(tmp_path: Path, rows: Rows) -> None:
    with client_of(tmp_path / "nobody.sock", rows) as client:
        client.store(1, TENANT, [])
        assert [each.job for each in client.finished()] == [1]


def test_bad_jobs_are_refused(keeper: Keeper, rows: Rows) -> None:
    with client_of(keeper.path, rows) as client:
        keeper.accept().welcome()
        wait_until(lambda: client.connected)
        with pytest.raises(ValueError, match="row 64"):
            client.load(1, TENANT, [(key_of(0), 64)])
        with pytest.raises(ValueError, match="35 bytes"):
            client.store(1, TENANT, [(ChunkKey(bytes(35)), 0, 0)])
        client.load(1, TENANT, [(key_of(0), 0)])
        with pytest.raises(ValueError, match="job 1 has not ended"):
            client.load(1, TENANT, [(key_of(0), 0)])
    with pytest.raises(ValueError, match="rows of 4096 bytes"):
        KeeperClient("", Region(rows.fd, 1, 4096), LAYOUT, engine_id="e")


def test_stores_beyond_the_queue_are_skipped(keeper: Keeper, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.keeper.client_jobs.MAX_QUEUED_BYTES", 3 * 8192)
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.welcome()
        wait_until(lambda: client.connected)
        client.store(1, TENANT, [(key_of(0), 0, 0), (key_of(1), 0, 1)])
        client.store(2, TENANT, [(key_of(2), 0, 2), (key_of(3), 0, 3)])
        assert one(client).failed == {key_of(2): SKIPPED, key_of(3): SKIPPED}
        client.store(3, TENANT, [(key_of(4), 0, 4)])
        client.load(4, TENANT, [(key_of(i), i) for i in range(10)])  # of loads the engine has rows for, or not
        assert [connection.read().job for _ in range(3)] == [1, 3, 4]
        connection.say(messages.Done(1, {}, 0))
        one(client)
        client.store(2, TENANT, [(key_of(2), 0, 2), (key_of(3), 0, 3)])
        assert connection.read().job == 2
        assert client.stats.skipped_stores == 2


def test_a_keeper_that_does_not_read_stalls_nobody(keeper: Keeper, rows: Rows) -> None:
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.welcome()
        wait_until(lambda: client.connected)
        chunks = [(key_of(i), i % 64) for i in range(2000)]
        slowest_s = 0.0
        for job in range(100):  # 8 MB, and the socket holds 0.2
            begin_s = time.perf_counter()
            client.load(job, TENANT, chunks)
            slowest_s = max(slowest_s, time.perf_counter() - begin_s)
        assert slowest_s < 0.5
        assert [connection.read().job for _ in range(100)] == list(range(100))


def test_the_end_of_the_stream_alone_ends_no_load(keeper: Keeper, rows: Rows) -> None:
    """The keeper is this process: its connection is gone, it is not."""
    lost = threading.Event()
    with client_of(keeper.path, rows, on_lost=lost.set) as client:
        connection = keeper.accept()
        connection.welcome([key_of(0)])
        wait_until(lambda: client.contains(key_of(0)))
        client.load(1, TENANT, [(key_of(0), 0)])
        client.store(2, TENANT, [(key_of(1), 0, 1)])
        connection.read()
        connection.read()
        connection.close()
        assert lost.wait(10)
        assert not client.contains(key_of(0))
        # It reconnects, and what it asks of this connection does not mix with what the last one owes.
        again = keeper.accept()
        again.welcome([key_of(0)])
        wait_until(lambda: client.connected)
        client.load(3, TENANT, [(key_of(0), 2)])
        assert again.read().job == 3
        again.say(messages.Done(3, {}, 0))
        assert one(client).job == 3
        assert client.has_unfinished
        assert client.stats.reconnects == 1
        with pytest.raises(ValueError, match="job 1 has not ended"):
            client.load(1, TENANT, [(key_of(0), 3)])


def test_bye_ends_what_is_left(keeper: Keeper, rows: Rows) -> None:
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.welcome()
        wait_until(lambda: client.connected)
        client.load(1, TENANT, [(key_of(0), 0)])
        client.load(2, TENANT, [(key_of(0), 1)])
        assert [connection.read().job, connection.read().job] == [1, 2]  # type: ignore[union-attr]
        connection.say(messages.Done(2, {}, 8192), messages.Bye("it stops"))
        wait_until(lambda: not client._jobs._unfinished)
        assert [(each.job, list(each.failed.values())) for each in client.finished()] == [(2, []), (1, [AWAY])]


def test_a_refusal_is_logged_once(keeper: Keeper, rows: Rows, caplog: pytest.LogCaptureFixture) -> None:
    with client_of(keeper.path, rows) as client:
        for _ in range(3):
            connection = keeper.accept()
            connection.read()
            connection.say(messages.Bye("another version"))
            connection.close()
        assert not client.connected
    assert caplog.text.count("another version") == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        messages.encode(messages.ChangedKeys(3, b"", b"")),
        messages.encode(messages.Done(99, {}, 0)),
        messages.encode(messages.SnapshotKeys(0, 1, 2, b"")),
        messages.encode(messages.SnapshotKeys(0, 0, 1, bytes(35))),
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
    ],
)
def test_a_keeper_that_talks_nonsense_is_left(keeper: Keeper, rows: Rows, nonsense: bytes) -> None:
    """And its word is still awaited before a row is given back."""
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.welcome([key_of(0)])
        wait_until(lambda: client.contains(key_of(0)))
        client.load(1, TENANT, [(key_of(0), 0)])
        connection.read()
        connection.socket.sendall(nonsense)
        with pytest.raises(EOFError):
            connection.read()
        assert not client.contains(key_of(0))
        assert client.has_unfinished
        if len(nonsense) > 5:  # its frames can be read
            connection.say(messages.Bye(""))
            assert one(client).failed == {key_of(0): AWAY}
        again = keeper.accept()
        again.welcome()
        wait_until(lambda: client.connected)


def test_a_silent_keeper_is_hidden_until_it_speaks(keeper: Keeper, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SILENCE_S", 0.2)
    monkeypatch.setattr("kvferry.keeper.client_thread._TICK_S", 0.05)
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.welcome([key_of(0)])
        wait_until(lambda: client.contains(key_of(0)))
        client.load(1, TENANT, [(key_of(0), 0)])
        wait_until(lambda: not client.connected)
        assert not client.contains(key_of(0))
        client.load(2, TENANT, [(key_of(0), 1)])
        assert [each.job for each in client.finished()] == [2]
        connection.say(messages.Pulse())
        wait_until(lambda: client.contains(key_of(0)))
        connection.say(messages.Done(1, {}, 8192))
        assert one(client).succeeded == {key_of(0)}
        assert client.stats.losses == 1


_DYING_KEEPER = """
import os, socket, sys, threading
from kvferry.keeper import messages
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[1])
listener.listen()
connection, _ = listener.accept()
connection.recv(65536)
connection.sendall(messages.encode(messages.Welcome("k", 1)) + messages.encode(messages.SnapshotKeys(0, 0, 1, b"")))
if sys.argv[2] == "child":
    if os.fork() == 0:  # holds the socket open
        os.read(0, 1)
        os._exit(0)
frames, jobs = messages.FrameReader(), set()
while jobs != {1, 2}:
    read = [messages.decode_to_keeper(payload) for payload in frames.feed(connection.recv(65536))]
    jobs.update(message.job for message in read if isinstance(message, messages.Load))
connection.sendall(messages.encode(messages.Done(1, {}, 8192)))
print("ready", flush=True)
if sys.argv[2] == "closes":
    connection.close()
    listener.close()
    print("closed", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("how", ["plain", "child", "closes"])
def test_the_end_of_its_process_ends_its_jobs(tmp_path: Path, rows: Rows, how: str) -> None:
    path = tmp_path / "keeper.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", _DYING_KEEPER, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        with client_of(path, rows) as client:
            wait_until(lambda: client.connected)
            client.load(1, TENANT, [(key_of(0), 0)])
            client.load(2, TENANT, [(key_of(0), 1)])
            assert process.stdout.readline() == "ready\n"
            if how == "closes":
                assert process.stdout.readline() == "closed\n"
                wait_until(lambda: not client.connected)
                assert 2 in client._jobs._unfinished, "it may still be writing"
            process.send_signal(signal.SIGKILL)
            wait_until(lambda: not client._jobs._unfinished)
            assert [(each.job, list(each.failed.values())) for each in client.finished()] == [(1, []), (2, [AWAY])]
    finally:
        process.kill()
        process.communicate()


def test_lookups_cost_less_than_a_microsecond(keeper: Keeper, rows: Rows) -> None:
    """300 keys of a million, as a scheduler would. Machines differ: the limit is ten times what was seen."""
    keys = [key_of(i) for i in range(100_000)]
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.read()
        connection.say(messages.Welcome("k", 1))
        for part in range(25):
            connection.say(messages.SnapshotKeys(0, part, 25, b"".join(keys[part * 4000 : (part + 1) * 4000])))
        wait_until(lambda: client.contains(keys[-1]))
        asked = keys[:150] + [key_of(-i) for i in range(1, 151)]
        best_s = 1.0
        for _ in range(20):
            begin_s = time.perf_counter()
            num_hits = sum(map(client.contains, asked))
            best_s = min(best_s, time.perf_counter() - begin_s)
        assert num_hits == 150
        assert best_s / 300 < 1e-6


def test_nothing_is_left_open(keeper: Keeper, rows: Rows) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with client_of(keeper.path, rows) as client:
        connection = keeper.accept()
        connection.welcome()
        wait_until(lambda: client.connected)
        client.stop()
        client.stop()
        with pytest.raises(EOFError):
            connection.read()
        connection.close()
    assert set(Path("/proc/self/fd").iterdir()) == before
