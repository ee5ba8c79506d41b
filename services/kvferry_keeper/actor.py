"""A node's keeper as a detached actor that ends with the application.

Ray stays in `app.py`, which passes functions.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from kvferry.config import ClusterConfig
from kvferry.errors import KvferryError
from kvferry.membership.base import Membership
from kvferry_keeper.lifecycle import KeeperHost

log = logging.getLogger(__name__)

RETRY_S = 5.0  # after a start that failed, such as on the socket of another keeper
HEALTH_PERIOD_S = 1.0
# How often the actor checks that the application is still deployed, and the misses in a row after which it ends.
DEPLOYED_PERIOD_S = 10.0
MAX_MISSES = 3


class KeeperActor:
    async def __init__(  # type: ignore[misc]
        self,
        values: dict[str, Any],
        settings: str,
        *,
        read_config: Callable[[dict[str, Any]], ClusterConfig],
        membership: Callable[[ClusterConfig], Membership],
        is_deployed: Callable[[], bool],
        end_actor: Callable[[], None],
    ) -> None:
        """Start serving in the background.

        `values` is what `read_config` takes; `settings` the digest that `settings()` returns. `is_deployed` returns
        whether the application exists, and may block; `end_actor` ends this process.
        """
        self._config = read_config(values)
        self._settings = settings
        self._membership = membership
        self._is_deployed = is_deployed
        self._end_actor = end_actor
        self._fault = "it has not started yet"
        self._host: KeeperHost | None = None
        self._settled = asyncio.Event()  # it serves, or its first start failed
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def settings(self) -> str:
        return self._settings

    async def started(self) -> str:
        """Wait for the first start; return why it failed, or an empty string."""
        await self._settled.wait()
        return self._fault

    async def stop(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        if self._host is not None:
            await self._host.stop()

    async def _serve(self) -> None:
        host = await self._start()
        await self._watch(host)
        log.info("the keeper ends: the application is gone")
        await host.stop()
        self._end_actor()

    async def _start(self) -> KeeperHost:
        while True:
            host: KeeperHost | None = None
            try:
                host = self._host = KeeperHost(self._config, self._membership(self._config))
                await host.start()
            except KvferryError as error:
                if error.message != self._fault:
                    log.error("the keeper cannot start, and tries again: %s", error.message)
                self._fault = error.message
                self._settled.set()
                if host is not None:
                    await host.stop()
                await asyncio.sleep(RETRY_S)
            else:
                self._fault = ""
                self._settled.set()
                return host

    async def _watch(self, host: KeeperHost) -> None:
        """Return without the application; end the process if the keeper is unhealthy."""
        num_missed = 0
        while num_missed < MAX_MISSES:
            for _ in range(round(DEPLOYED_PERIOD_S / HEALTH_PERIOD_S)):
                await asyncio.sleep(HEALTH_PERIOD_S)
                try:
                    await host.check_health()
                except KvferryError as error:
                    # I/O that hangs in this process cannot be ended otherwise; Ray starts the actor anew.
                    log.error("the keeper ends: %s", error.message)
                    os._exit(1)
            num_missed = 0 if await asyncio.to_thread(self._is_deployed) else num_missed + 1
