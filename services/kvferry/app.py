"""The composition root: a configuration becomes a Ray Serve application. The only importer of ray.

Serve places replicas, restarts, health-checks and scales them. No token and no page passes a Serve proxy or handle:
each replica hosts its own server and is found through membership.

Where there are volumes, each node with a worker has a keeper too: a detached actor, pinned to the node, that the first
worker to start there makes and Ray restarts. It outlives workers, whose engines find it again by its socket, and ends
by itself once the application is gone.

    python -m kvferry.app deploy --config cluster.yaml --ray-address 127.0.0.1:6379
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, RunTarget
from ray.serve._private import replica
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry import __version__
from kvferry import config as configuration
from kvferry.config import ClusterConfig, RoleConfig
from kvferry.errors import ConfigError, KvferryError
from kvferry.gateway.host import GatewayHost
from kvferry.membership.base import MemberKind, Membership
from kvferry.membership.etcd import EtcdMembership
from kvferry.tier.socket_path import socket_path
from kvferry.worker.host import WorkerHost, build_engine
from kvferry.worker.keeper_host import KeeperHost

log = logging.getLogger(__name__)

APPLICATION = "kvferry"
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 30.0
# Time for a stopping replica beyond its own drain: ending engines and servers.
STOP_MARGIN_S = 30.0

KEEPER_NAMESPACE = "kvferry"
# How long a worker waits for its node's keeper; it starts without it then, and finds it later.
KEEPER_START_S = 60.0
KEEPER_RETRY_S = 5.0  # after a start that failed, such as on a volume that another keeper still has
# A keeper looks this often whether the application is still there, and ends when it was not so many times.
KEEPER_LOOK_S = 10.0
KEEPER_LOOKS = 3


class _WorkerReplica:
    """One worker in one Serve replica. Serve calls `check_health`, and the finalizer when it stops the replica."""

    kind: MemberKind

    async def __init__(self, values: dict[str, Any], model_folder: str) -> None:  # type: ignore[misc]
        config = _in_replica(values)
        keeper_socket = ""
        if config.tier.volumes:
            await ensure_keeper(values)
            keeper_socket = str(socket_path(config.tier))
        engine = build_engine(config, self.kind, model_folder, keeper_socket=keeper_socket)
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


class KeeperActor:
    """A node's keeper in an actor that never fails to be made: what cannot start now is tried again."""

    async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]
        self._config = _in_replica(values)
        self._settings = keeper_settings(values)
        self._fault = "it has not started yet"
        self._host: KeeperHost | None = None
        self._settled = asyncio.Event()  # it serves, or could not at first
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def settings(self) -> str:
        return self._settings

    async def started(self) -> str:
        """Why it does not serve; empty when it does."""
        await self._settled.wait()
        return self._fault

    async def stop(self) -> None:
        """Leave orderly: registered no more, every page at rest."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        if self._host is not None:
            await self._host.stop()

    async def _serve(self) -> None:
        while self._fault:
            host = self._host = KeeperHost(self._config, _membership(self._config))
            try:
                await host.start()
                self._fault = ""
                self._settled.set()
            except KvferryError as error:
                if error.message != self._fault:
                    log.error("the keeper cannot start, and tries again: %s", error.message)
                self._fault = error.message
                self._settled.set()
                await host.stop()
                await asyncio.sleep(KEEPER_RETRY_S)
        num_missed = 0
        while num_missed < KEEPER_LOOKS:
            for _ in range(round(KEEPER_LOOK_S / HEALTH_PERIOD_S)):
                await asyncio.sleep(HEALTH_PERIOD_S)
                try:
                    await host.check_health()
                except KvferryError as error:
                    # What hangs in it cannot be ended otherwise; Ray starts it anew.
                    log.error("the keeper ends: %s", error.message)
                    os._exit(1)
            num_missed = 0 if await asyncio.to_thread(_is_deployed) else num_missed + 1
        log.info("the keeper ends: the application is gone")
        await host.stop()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def keeper_settings(values: dict[str, Any]) -> str:
    """A digest of everything that a keeper is made from: one with other settings is not the keeper that is wanted."""
    sections = [values[section] for section in ("tier", "membership", "metrics", "tracing")]
    parts = [*sections, values["worker"]["tls"], values["engine"]["device"], __version__]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


async def ensure_keeper(values: dict[str, Any]) -> None:
    """See that this node has a keeper with these settings, and wait for it a while.

    Raises nothing: engines serve without it, and find it when it is there.
    """
    # By its import path, not by value, as this module is `__main__` where the application is deployed from.
    from kvferry.app import KeeperActor as Keeper

    node_id = ray.get_runtime_context().get_node_id()
    fault = "it is replaced again and again"
    try:
        async with asyncio.timeout(KEEPER_START_S):
            while True:
                keeper = (
                    ray.remote(Keeper)
                    .options(
                        name=f"keeper-{node_id}",
                        namespace=KEEPER_NAMESPACE,
                        get_if_exists=True,
                        lifetime="detached",
                        max_restarts=-1,
                        num_cpus=0,
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                    )
                    .remote(values)
                )
                with contextlib.suppress(RayError):
                    if await keeper.settings.remote() == keeper_settings(values):
                        fault = await keeper.started.remote()
                        break
                    log.warning("this node's keeper has other settings, of an earlier deployment: it is replaced")
                    await keeper.stop.remote()
                    ray.kill(keeper, no_restart=True)
                await asyncio.sleep(HEALTH_PERIOD_S)  # until its name is free
    except TimeoutError:
        pass
    if fault:
        log.error("this node's keeper does not serve: %s; pages of volumes are computed until it does", fault)


def _is_deployed() -> bool:
    """Whether Serve has the application, or cannot be asked just now."""
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        return APPLICATION in serve.status().applications
    except ValueError:
        return False  # Serve is gone
    except Exception as error:
        log.warning("Serve cannot be asked for its applications: %s", error)
        return True


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
    config = configuration.parse(values)
    close_handle_server()
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
