"""NIXL on its own thread: registers memory, and reads other processes'.

The thread polls only while transfers run or memory is lent; NIXL's own would spin.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvferry.errors import TierError

log = logging.getLogger(__name__)

# Periods of polling transfers and lent memory. Shorter ones cost a tenth of a core and move no more bytes; a progress
# thread that waits for data was worse.
_POLL_S = 0.0005
_POLL_LENT_S = 0.001
_BACKEND = "UCX"


class Read(NamedTuple):
    remote_address: int
    local_address: int
    num_bytes: int


@dataclass(slots=True)
class _Transfer:
    future: asyncio.Future[bool]
    deadline_s: float
    is_failed: bool = False  # or late: it is over as soon as NIXL lets go of it


class NixlAgent:
    """Imports NIXL at the first use. Methods belong to one event loop.

    All raise TierError if NIXL is missing or refuses.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_lent = 0
        self._fault = ""
        self.num_uncancelled = 0  # transfers that failed or are late, and may still write
        # Used by the thread only.
        self._nixl: Any = None
        self._transfers: dict[Any, _Transfer] = {}
        self._poll_fault = ""  # the last one, which is logged once
        self._registered: dict[int, Any] = {}

    def __repr__(self) -> str:
        state = self._fault or ("idle" if self._thread is None else f"{len(self._transfers)} transfers")
        return f"<NixlAgent {self.name}: {state}>"

    async def register(self, address: int, num_bytes: int) -> None:
        await self._do(lambda: self._register(address, num_bytes))

    async def deregister(self, address: int) -> None:
        """Idempotent. No transfer may use this memory."""
        await self._do(lambda: self._deregister(address))

    async def metadata(self, address: int) -> bytes:
        """Return what other agents need to read the memory registered at `address`."""
        return bytes(await self._do(lambda: self._metadata(address)))

    async def add_remote(self, metadata: bytes) -> str:
        name = await self._do(lambda: self._nixl.add_remote_agent(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    async def remove_remote(self, name: str) -> None:
        await self._do(lambda: self._nixl.remove_remote_agent(name))

    async def read(self, remote: str, reads: Sequence[Read], timeout_s: float) -> bool:
        """Read pieces of a remote agent's memory. Returns False if any failed, or after `timeout_s`.

        Returns once nothing is being written, later where NIXL cannot cancel the transfer; must not be cancelled.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._do(lambda: self._begin(remote, reads, _Transfer(future, time.monotonic() + timeout_s)))
        return await future

    def begin_lending(self) -> None:
        self._num_lent += 1
        self._commands.put((lambda: None, asyncio.get_running_loop().create_future()))

    def end_lending(self) -> None:
        self._num_lent -= 1

    async def stop(self) -> None:
        """End the thread, not the running transfers. Idempotent."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._fault = self._fault or "stopped"
        self._commands.put(None)
        await asyncio.to_thread(thread.join)

    async def _do(self, command: Callable[[], Any]) -> Any:
        if self._fault:
            raise TierError(f"NIXL: {self._fault}")
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._loop = loop
            self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
            self._thread.start()
        future: asyncio.Future[Any] = loop.create_future()
        self._commands.put((command, future))
        return await future

    # On the thread

    def _run(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            self._nixl = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))
        except ImportError as error:
            self._fault = f"it is not installed ({error}): chunks of other nodes are misses"
        except Exception as error:
            self._fault = f"it does not start ({error}): chunks of other nodes are misses"
        if self._fault:
            log.warning("NIXL: %s", self._fault)
        while True:
            is_reading = len(self._transfers) > self.num_uncancelled
            is_needed = self._transfers or self._num_lent > 0
            timeout_s = _POLL_S if is_reading else _POLL_LENT_S if is_needed else None
            try:
                command = self._commands.get(timeout=timeout_s)
            except queue.Empty:
                self._poll()
                continue
            if command is None:
                break
            self._execute(*command)
        self._nixl = None

    def _execute(self, command: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            if self._fault:
                raise TierError(f"NIXL: {self._fault}")
            result = command()
        except TierError as error:
            self._answer(future, None, error)
        except Exception as error:
            self._answer(future, None, TierError(f"NIXL: {type(error).__name__}: {error}"))
        else:
            self._answer(future, result, None)

    def _answer(self, future: asyncio.Future[Any], result: Any, error: TierError | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            log.debug("the loop is closed; a result of NIXL is dropped")

    def _register(self, address: int, num_bytes: int) -> None:
        if address not in self._registered:
            self._registered[address] = self._nixl.register_memory(
                [(address, num_bytes, 0, "")], "DRAM", backends=[_BACKEND]
            )

    def _deregister(self, address: int) -> None:
        registered = self._registered.pop(address, None)
        if registered is not None:
            self._nixl.deregister_memory(registered, backends=[_BACKEND])

    def _metadata(self, address: int) -> Any:
        return self._nixl.get_partial_agent_metadata(self._registered[address], True, [_BACKEND])

    def _begin(self, remote: str, reads: Sequence[Read], transfer: _Transfer) -> None:
        nixl = self._nixl
        here = nixl.get_xfer_descs([(read.local_address, read.num_bytes, 0) for read in reads], "DRAM")
        there = nixl.get_xfer_descs([(read.remote_address, read.num_bytes, 0) for read in reads], "DRAM")
        handle = nixl.initialize_xfer("READ", here, there, remote, backends=[_BACKEND])
        # From here on memory may be written: raise nothing.
        self._transfers[handle] = transfer
        try:
            state = nixl.transfer(handle)
        except Exception:
            log.exception("a NIXL transfer could not be begun")
            state = "ERR"
        self._update(handle, state)

    def _poll(self) -> None:
        if self._num_lent > 0 or self.num_uncancelled:
            try:
                self._nixl.get_new_notifs()  # which moves what is under way
            except Exception as error:
                if str(error) != self._poll_fault:
                    log.error("NIXL cannot be polled: %s", error)
                self._poll_fault = str(error)
        now_s = time.monotonic()
        for handle, transfer in list(self._transfers.items()):
            if transfer.is_failed:
                self._let_go(handle, transfer)
                continue
            if now_s > transfer.deadline_s:
                log.warning("a NIXL transfer takes too long and is cancelled")
                self._update(handle, "ERR")
                continue
            try:
                state = self._nixl.check_xfer_state(handle)
            except Exception as error:
                # Raised for failed transfers, for instance after a connection error.
                log.warning("a NIXL transfer failed: %s", error)
                state = "ERR"
            self._update(handle, state)

    def _update(self, handle: Any, state: str) -> None:
        transfer = self._transfers[handle]
        if state == "DONE":
            del self._transfers[handle]
            try:
                handle.release()
            except Exception as error:
                log.warning("a NIXL transfer that is done could not be released: %s", error)
            self._answer(transfer.future, True, None)
        elif state != "PROC":
            transfer.is_failed = True
            self.num_uncancelled += 1
            self._let_go(handle, transfer)

    def _let_go(self, handle: Any, transfer: _Transfer) -> None:
        # Neither an error nor a deadline means that nothing is written any more, only that a release succeeded.
        try:
            handle.release()
        except Exception as error:
            log.debug("a NIXL transfer cannot be cancelled yet: %s", error)
            return
        del self._transfers[handle]
        self.num_uncancelled -= 1
        self._answer(transfer.future, False, None)
