"""The thread of a keeper client.

A sent job ends with the keeper's Done or Bye, or its process (seen on a pidfd), never with the stream alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import selectors
import threading
from collections.abc import Callable, Set

from kvferry.keeper import messages
from kvferry.keeper.client_jobs import ClientJobs
from kvferry.keeper.keeper_connection import ConnectionState, KeeperConnection
from kvferry.keeper.layout import ChunkKey
from kvferry.keeper.messages import ProtocolError

log = logging.getLogger(__name__)

_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_WELCOME_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 1.0
_TICK_S = 1.0
# Bytes encoded ahead of a slow keeper. Later jobs are not sent yet, and can be failed at once.
_MAX_UNSENT_BYTES = 1 << 20

_NO_KEYS: frozenset[ChunkKey] = frozenset()


class ClientThread:
    """Other threads may use `keys`, `start`, `wake` and `stop`. `on_lost` is called here."""

    def __init__(
        self,
        socket_path: str,
        hello: messages.Hello,
        region_fd: int,
        jobs: ClientJobs,
        *,
        on_lost: Callable[[], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._socket_path = socket_path
        self._hello = hello
        self._region_fd = region_fd
        self._jobs = jobs
        self._on_lost = on_lost
        self._clock = clock
        self._random = random.Random(hello.engine_id)
        # The keys that can be loaded. Replaced as a whole.
        self.keys: Set[ChunkKey] = _NO_KEYS
        self._is_woken = False
        self._is_stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._connection: KeeperConnection | None = None
        # Former connections, with jobs whose rows the keeper may still use.
        self._former: list[KeeperConnection] = []
        self._backoff_s = _MIN_BACKOFF_S
        self._connect_at_s = 0.0
        self._logged_fault = ""

    def __repr__(self) -> str:
        return f"<ClientThread {self._connection!r}, {len(self._former)} former connections>"

    def start(self) -> None:
        name = f"keeper-client-{self._hello.engine_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        if not self._is_woken and self._wake_fd >= 0:
            self._is_woken = True
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Leave the keeper and end the thread, within about a second. Idempotent."""
        self._is_stopping = True
        self._jobs.close()
        self.wake()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._wake_fd >= 0:
            self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1

    # On the thread

    def _run(self) -> None:
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._connect_at_s = self._clock()
        try:
            while not self._is_stopping:
                self._step(self._timeout_s())
            self._say_goodbye()
        except Exception:
            log.exception("the keeper client of engine %s fails; its chunks are misses", self._hello.engine_id)
            self._hide_keys()
        finally:
            for connection in [self._connection, *self._former]:
                if connection is not None:
                    connection.close()

    def _timeout_s(self) -> float:
        if self._connection is not None:
            return _TICK_S
        return min(_TICK_S, max(0.0, self._connect_at_s - self._clock()))

    def _step(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.fileobj == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                # Before looking at the waiting jobs: a later submission wakes the thread again.
                self._is_woken = False
                continue
            connection: KeeperConnection = key.data
            if key.fileobj == connection.peer.pidfd:
                self._on_process_ended(connection)
            elif connection.is_open and events & selectors.EVENT_READ:
                self._receive(connection)
        self._close_former()
        current = self._connection
        if current is None:
            if self._clock() >= self._connect_at_s and not self._is_stopping:
                self._connect()
            return
        self._apply_timeouts(current)
        if current.state is ConnectionState.SERVING:
            self._encode_waiting(current)
        current.flush()

    def _connect(self) -> None:
        try:
            self._connection = KeeperConnection(
                self._socket_path, self._hello, self._region_fd, self._selector, self._clock()
            )
        except OSError as error:
            self._log_fault(f"no keeper at {self._socket_path} yet: {error}")
            self._back_off()

    def _encode_waiting(self, connection: KeeperConnection) -> None:
        while len(connection.unsent) < _MAX_UNSENT_BYTES:
            message = self._jobs.pop_waiting(connection.jobs)
            if message is None:
                return
            connection.unsent += messages.encode(message)

    def _apply_timeouts(self, connection: KeeperConnection) -> None:
        silent_s = self._clock() - connection.heard_s
        if connection.state is ConnectionState.GREETING:
            if silent_s > _WELCOME_TIMEOUT_S:
                self._lose(connection, "it does not answer")
        elif connection.state is ConnectionState.SERVING and silent_s > messages.SILENCE_S and not connection.is_silent:
            log.warning("nothing is heard from the keeper; its chunks are misses until it speaks again")
            connection.is_silent = True
            self._hide_keys()
            self._report_loss()

    # Messages

    def _receive(self, connection: KeeperConnection) -> bool:
        try:
            data = connection.receive()
        except OSError as error:
            self._lose(connection, str(error))
            return False
        if data is None:
            return False
        if not data:
            self._lose(connection, "it has closed the connection")
            return False
        connection.heard_s = self._clock()
        if connection.is_silent and connection is self._connection:
            log.info("the keeper is heard from again")
            connection.is_silent = False
            self._show_keys(connection)
        try:
            for message in connection.decode(data):
                self._dispatch(connection, message)
                if not connection.is_open:
                    return False
        except ProtocolError as error:
            if connection.state is ConnectionState.LEAVING:
                self._lose(connection, str(error))  # no later message can be decoded
            else:
                self._leave(connection, f"it violates the protocol: {error}")
        return True

    def _dispatch(self, connection: KeeperConnection, message: messages.ToEngine) -> None:
        is_current = connection is self._connection
        match message:
            case messages.Done():
                self._on_done(connection, message)
            case messages.Bye():
                self._end_jobs(connection)
                self._lose(connection, f"it said {message.reason!r}" if message.reason else "it left")
            case messages.ChangedKeys() if is_current:
                connection.mirror.apply_change(message)
            case messages.SnapshotKeys() if is_current:
                connection.mirror.apply_part(message)
                if connection.mirror.is_complete:
                    self._show_keys(connection)
            case messages.Welcome() if connection.state is ConnectionState.GREETING:
                connection.state = ConnectionState.SERVING
                self._logged_fault = ""
                self._jobs.count_connect()
                self._show_keys(connection)
                log.info("connected to keeper %s (process %d)", message.keeper_id, connection.peer.pid)
            case _:
                pass  # a pulse, or a message that no longer matters

    def _on_done(self, connection: KeeperConnection, message: messages.Done) -> None:
        job = connection.jobs.pop(message.job, None)
        if job is None:
            raise ProtocolError(f"the end of job {message.job}, which it was not given")
        failed = message.failed
        if any(not 0 <= i < len(job.keys) for i in failed):
            # An index that is none of this job's: fail all chunks rather than too few.
            failed = dict.fromkeys(range(len(job.keys)), "unknown")
        if job.is_load and failed:
            # Before the job ends: an engine that still found the keys would try to load them forever.
            keys = [job.keys[i] for i in failed]
            connection.mirror.discard(keys)
            if isinstance(self.keys, set):
                self.keys.difference_update(keys)  # not the mirror's set while a new snapshot arrives
        self._jobs.end(job, failed, message.num_bytes)

    # Connection states

    def _show_keys(self, connection: KeeperConnection) -> None:
        if connection.mirror.is_complete:
            self.keys = connection.mirror.keys
        self._jobs.open()

    def _hide_keys(self) -> None:
        self.keys = _NO_KEYS
        self._jobs.fail_waiting()

    def _leave(self, connection: KeeperConnection, reason: str) -> None:
        if not connection.is_open or connection.state is ConnectionState.LEAVING:
            return
        log.warning("leaving the keeper: %s", reason)
        connection.state = ConnectionState.LEAVING
        self._retire(connection)
        connection.stop_sending()

    def _lose(self, connection: KeeperConnection, reason: str) -> None:
        connection.close_socket()
        if connection is self._connection:
            self._log_fault(f"the keeper is lost: {reason}")
            self._retire(connection)

    def _on_process_ended(self, connection: KeeperConnection) -> None:
        while connection.is_open and self._receive(connection):
            pass  # the process's last messages count
        self._end_jobs(connection)
        self._lose(connection, "its process has ended")

    def _end_jobs(self, connection: KeeperConnection) -> None:
        jobs, connection.jobs = connection.jobs, {}
        self._jobs.fail(jobs.values())

    def _retire(self, connection: KeeperConnection) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._former.append(connection)
        was_open = self._jobs.is_open
        self._hide_keys()
        if self._clock() - connection.began_s > _MAX_BACKOFF_S:
            self._backoff_s = _MIN_BACKOFF_S
        self._back_off()
        if was_open:
            self._report_loss()

    def _close_former(self) -> None:
        for connection in self._former[:]:
            if not connection.jobs:
                self._former.remove(connection)
                connection.close()

    def _back_off(self) -> None:
        self._connect_at_s = self._clock() + self._backoff_s * self._random.uniform(0.5, 1.0)
        self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s)

    def _report_loss(self) -> None:
        self._jobs.count_loss()
        if self._on_lost is not None:
            self._on_lost()

    def _log_fault(self, fault: str) -> None:
        if fault != self._logged_fault:
            self._logged_fault = fault
            log.warning("%s", fault)

    def _say_goodbye(self) -> None:
        self._hide_keys()
        if self._connection is not None:
            self._leave(self._connection, "this engine stops")
        end_s = self._clock() + _GOODBYE_TIMEOUT_S
        self._close_former()
        while self._former and (left_s := end_s - self._clock()) > 0:
            self._step(left_s)
