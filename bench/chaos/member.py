"""One worker or gateway as a process of its own: `python -m bench.chaos.member KIND PORT CONFIG`, CONFIG as JSON.

What a Serve replica does, without Serve: a test kills and starts these a hundred times. Prints one line once it serves
and goes on until it is killed, or ends itself when its engine dies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys

from kvferry import config as configuration
from kvferry.errors import EngineDead
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.membership.base import MemberKind
from kvferry.membership.etcd import EtcdMembership
from kvferry.worker.lifecycle import WorkerHost, build_engine


async def run(kind: MemberKind, port: int, values: dict[str, object]) -> None:
    asked_to_stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    config = configuration.parse(values)
    membership = EtcdMembership(config.membership)
    if kind is MemberKind.GATEWAY:
        config = config.model_copy(
            update={"gateway": config.gateway.model_copy(update={"http_port": port, "grpc_port": None})}
        )
        gateway = GatewayHost(config, config.model.path, membership)
        await gateway.start()
        print(json.dumps({"member_id": gateway.gateway_id}), flush=True)
        await asked_to_stop.wait()
        await gateway.drain()
        await gateway.stop()
        return
    worker = WorkerHost(config, kind, build_engine(config, kind, config.model.path), membership)
    await worker.start()
    print(json.dumps({"member_id": worker.worker_id}), flush=True)
    try:
        while not asked_to_stop.is_set():
            await worker.check_health()
            try:
                async with asyncio.timeout(0.5):
                    await asked_to_stop.wait()
            except TimeoutError:
                continue
        await worker.drain()
    except EngineDead as error:
        print(f"{worker.worker_id}: {error.message}", file=sys.stderr)
    await worker.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(run(MemberKind(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
