"""The composition root: a configuration becomes a Ray Serve application. The only importer of ray.

Serve places replicas, restarts, health-checks and scales them. No token and no page passes a Serve proxy or handle:
each replica hosts its own server and is found through membership.

    python -m kvferry.app deploy --config cluster.yaml --ray-address 127.0.0.1:6379
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application, RunTarget
from ray.serve._private import replica
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry import config as configuration
from kvferry.config import ClusterConfig, RoleConfig
from kvferry.errors import ConfigError, KvferryError
from kvferry.gateway.host import GatewayHost
from kvferry.membership.base import MemberKind, Membership
from kvferry.membership.etcd import EtcdMembership
from kvferry.worker.host import WorkerHost, build_engine
from kvferry.worker.keeper_host import KeeperHost

log = logging.getLogger(__name__)

APPLICATION = "kvferry"
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 30.0
# Of a keeper without engines: longer than it takes to start a worker anew.
LINGER_S = 1800.0
LOOK_EVERY_S = 1.0
KEEPER_PAUSE_S = 0.2
# Time for a stopping replica beyond its own drain: ending engines and servers.
STOP_MARGIN_S = 30.0


class KeeperActor:
    """The keeper of one node, in an actor that Ray starts again when it dies.

    It belongs to no deployment: engines come and go, and a keeper that went with them would have to find its pages
    again. It ends by itself once no engine has been with it for LINGER_S.
    """

    async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]
        config = _configured(values)
        self._tier = config.tier
        self._host = KeeperHost(config, _membership(config))
        try:
            await self._host.start()
        except BaseException:
            await self._host.stop()
            raise
        self._leaving = asyncio.create_task(self._leave_when_alone())

    async def socket_path(self, values: dict[str, Any]) -> str:
        """Where engines connect; empty when this keeper was started with another configuration of the tier."""
        return str(self._host.keeper.socket_path) if configuration.parse(values).tier == self._tier else ""

    async def stop(self) -> None:
        """Give volumes and socket back: another keeper is about to take them."""
        self._leaving.cancel()
        await self._host.stop()

    async def _leave_when_alone(self) -> None:
        alone_since_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._host.check_health()
            except KvferryError as error:
                log.error("the keeper ends, to be started again: %s", error.message)
                os._exit(1)
            if self._host.keeper.stats.engines:
                alone_since_s = time.monotonic()
            elif time.monotonic() - alone_since_s > LINGER_S:
                await self._host.stop()
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


async def keeper_socket(values: dict[str, Any]) -> str:
    """Where the keeper of this node takes engines, started if it is not there yet. Empty where there are no volumes."""
    config = configuration.parse(values)
    if not config.tier.volumes:
        return ""
    node_id = ray.get_runtime_context().get_node_id()
    actor = ray.remote(KeeperActor).options(
        name=f"{config.name}-keeper-{node_id}",
        namespace=APPLICATION,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    while True:
        keeper = actor.remote(values)
        if path := await keeper.socket_path.remote(values):
            return str(path)
        # Left over from before the configuration was changed.
        with contextlib.suppress(ray.exceptions.RayActorError):
            await keeper.stop.remote()
        ray.kill(keeper, no_restart=True)
        await asyncio.sleep(KEEPER_PAUSE_S)


class _WorkerReplica:
    """One worker in one Serve replica. Serve calls `check_health`, and the finalizer when it stops the replica."""

    kind: MemberKind

    async def __init__(self, values: dict[str, Any], model_folder: str) -> None:  # type: ignore[misc]
        config = _in_replica(values)
        socket_path = await keeper_socket(values)
        engine = build_engine(config, self.kind, model_folder, keeper_socket=socket_path)
        self._host = WorkerHost(config, self.kind, engine, _membership(config))
        try:
            await self._host.start()
        except BaseException:
            await self._host.stop()
            raise

    async def check_health(self) -> None:
        await self._host.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_host"):
            await self._host.drain()
            await self._host.stop()


class PrefillWorker(_WorkerReplica):
    """Computes prompts and hands their pages over."""

    kind = MemberKind.PREFILL


class DecodeWorker(_WorkerReplica):
    """Pulls pages and generates tokens; computes prompts itself where it must."""

    kind = MemberKind.DECODE


class Gateway:
    """One gateway in one Serve replica, on a listener of its own.

    `_workers` only ties the deployments into one application.
    """

    async def __init__(  # type: ignore[misc]
        self, values: dict[str, Any], model_folder: str, *_workers: Any
    ) -> None:
        config = _in_replica(values)
        self._host = GatewayHost(config, model_folder, _membership(config))
        try:
            await self._host.start()
        except BaseException:
            await self._host.stop()
            raise

    async def check_health(self) -> None:
        await self._host.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_host"):
            await self._host.drain()
            await self._host.stop()


def build(config: ClusterConfig, model_folder: str) -> Application:
    """The Serve application of a configuration: up to three deployments."""
    values = config.model_dump(mode="json")
    workers = [
        serve.deployment(deployment)
        .options(**_options(role, drain_timeout_s=config.worker.drain_timeout_s))
        .bind(values, model_folder)
        for deployment, role in ((PrefillWorker, config.prefill), (DecodeWorker, config.decode))
        if role.replicas
    ]
    gateway = RoleConfig(replicas=config.gateway.replicas, num_cpus=config.gateway.num_cpus)
    return (
        serve.deployment(Gateway)
        .options(**_options(gateway, drain_timeout_s=config.gateway.drain_timeout_s))
        .bind(values, model_folder, *workers)
    )


def deploy(config: ClusterConfig, model_folder: str, ray_address: str) -> None:
    """Submit the application to a running Ray and return; replicas come up by themselves."""
    ray.init(address=ray_address, log_to_driver=False, logging_level=logging.WARNING)
    try:
        # Serve's own proxies would listen for traffic that never comes.
        serve.start(proxy_location="Disabled", http_options={"host": "127.0.0.1", "location": "NoServer"})
        serve.run_many(
            [RunTarget(target=build(config, model_folder), name=APPLICATION, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    finally:
        ray.shutdown()


def _options(role: RoleConfig, *, drain_timeout_s: float) -> dict[str, Any]:
    return {
        "num_replicas": role.replicas,
        "ray_actor_options": {
            "num_cpus": role.num_cpus,
            "num_gpus": role.num_gpus,
            "resources": dict(role.resources),
        },
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": drain_timeout_s + STOP_MARGIN_S,
    }


def _membership(config: ClusterConfig) -> Membership:
    return EtcdMembership(config.membership)


def _in_replica(values: dict[str, Any]) -> ClusterConfig:
    close_handle_server()
    return _configured(values)


def _configured(values: dict[str, Any]) -> ClusterConfig:
    config = configuration.parse(values)
    logging.basicConfig(
        level=config.log_level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    return config


def close_handle_server() -> None:
    """Keep Serve from opening its handle server in this replica.

    Every replica would listen on all interfaces for requests of other deployments, without authentication, and unpickle
    what comes (ray.serve._private.replica). Nothing of kvferry passes a handle, so nothing needs it. Must run before
    the replica's constructor returns; Serve opens the server right after.
    """
    if not hasattr(replica, "add_port_to_grpc_server"):
        raise ConfigError("this version of Ray Serve opens its handle server in a way kvferry cannot close")
    replica.add_port_to_grpc_server = lambda server, address: 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvferry.app", description="Deploy kvferry to a running Ray.")
    commands = parser.add_subparsers(dest="command", required=True)
    deploying = commands.add_parser("deploy", help="submit the application and return")
    deploying.add_argument("--config", type=Path, required=True, help="a YAML configuration with membership.endpoints")
    deploying.add_argument("--model-folder", required=True, help="the model's folder, the same string on every node")
    deploying.add_argument("--ray-address", default=os.environ.get("RAY_ADDRESS", "auto"))
    arguments = parser.parse_args()
    try:
        config = configuration.load(arguments.config)
        if not config.membership.endpoints:
            raise ConfigError("membership.endpoints: etcd's addresses are needed to deploy")
        deploy(config, arguments.model_folder, arguments.ray_address)
    except KvferryError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
