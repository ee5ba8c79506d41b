"""One worker or gateway as a process of its own: `python -m bench.chaos.member KIND PORT CONFIG`, CONFIG as JSON.

What a Serve replica does, without Serve: a test kills and starts these a hundred times. Prints one line once it serves
and goes on until it is killed, or ends itself when its engine dies. CONFIG may have three options beside the sections
of a configuration: with `mortal: true` an engine dies of a prompt that begins with POISON, with `work: FOLDER` a worker
writes there what its engine computes (`bench.chaos.work`), and with `release: previous` the process says and sends no
more than the release before versions of the protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.chaos.work import WorkFile
from kvferry import config as configuration
from kvferry.engine.base import EngineOutput, EngineRequest
from kvferry.errors import EngineDead
from kvferry.gateway import lifecycle as gateway_lifecycle
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.link.identity import Identity, ServedModel
from kvferry.membership.base import MemberKind
from kvferry.membership.etcd import EtcdMembership
from kvferry.worker import lifecycle as worker_lifecycle
from kvferry.worker.lifecycle import WorkerHost, build_engine
from kvferry_sim import SimEngine
from kvferry_sim.tokenizer import SimTokenizer

POISON = "poison"


def make_mortal(engine: SimEngine) -> None:
    """Let the engine die of a prompt that begins with POISON."""
    (poison,) = SimTokenizer().encode(POISON)
    generate = engine.generate

    def generate_or_die(request: EngineRequest, **of_worker: Any) -> AsyncIterator[EngineOutput]:
        # Behind the marker of the beginning. Further on it may be a token of an answer that goes on.
        if poison in list(request.prompt_token_ids[:2]):
            engine.kill()
        return generate(request, **of_worker)

    engine.generate = generate_or_die  # type: ignore[method-assign]


def be_previous_release() -> None:
    for module in (gateway_lifecycle, worker_lifecycle):
        module.identity = lambda config, folder: Identity("", ServedModel(), 1, 1, frozenset())


async def run(kind: MemberKind, port: int, values: dict[str, object]) -> None:
    if values.pop("release", "") == "previous":
        be_previous_release()
    is_mortal, work = values.pop("mortal", False), values.pop("work", None)
    asked_to_stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    config = configuration.parse(values)
    membership = EtcdMembership(config.membership)
    if kind is MemberKind.GATEWAY:
        # Gateways of one machine would share the default port.
        grpc_port = config.gateway.grpc_port if "grpc_port" in config.gateway.model_fields_set else None
        config = config.model_copy(
            update={"gateway": config.gateway.model_copy(update={"http_port": port, "grpc_port": grpc_port})}
        )
        gateway = GatewayHost(config, config.model.path, membership)
        await gateway.start()
        print(json.dumps({"member_id": gateway.gateway_id}), flush=True)
        await asked_to_stop.wait()
        await gateway.drain()
        await gateway.stop()
        return
    engine = build_engine(config, kind, config.model.path)
    if is_mortal:
        assert isinstance(engine, SimEngine)
        make_mortal(engine)
    worker = WorkerHost(config, kind, engine, membership, heartbeat_s=0.5)
    if work is not None:
        WorkFile(Path(str(work)), worker.worker_id).record(engine)
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
