"""The Ray Serve application of a configuration. The only importer of ray.

Serve places replicas, restarts, health-checks and scales them; tokens and pages never pass it. Each node with workers
and volumes also gets a keeper (kvferry_keeper/actor.py): a detached actor that its first worker makes and Ray restarts.
KubeRay and `serve deploy` import kvferry.app:application; `python -m kvferry.app deploy` makes the same one.
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
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
from kvferry.config import ROLES, ClusterConfig, ModelEntryConfig, RoleConfig
from kvferry.engine.quality_report import check_quality_report
from kvferry.engine.vllm.rendering.text_model import use_cpu_platform
from kvferry.errors import ConfigError, KvferryError
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.hub_model.marker import why_not_whole
from kvferry.keeper.unix_socket import socket_path
from kvferry.membership.base import MemberKind, Membership
from kvferry.membership.etcd import EtcdMembership
from kvferry.util import collector, satellites
from kvferry.util.addresses import NODE_ADDRESS_VARIABLE
from kvferry.util.deployment_causes import CAUSE_MARK, GIVEN_UP, cause_of, causes_of
from kvferry.worker.lifecycle import WorkerHost, build_engine

log = logging.getLogger(__name__)

APPLICATION = "kvferry"
# Before an entry's name. The chart makes one of each: all deployments of a declared application have one version.
APPLICATION_OF_ENTRY = "kvferry-model-"
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 30.0
# Time for a stopping replica beyond its own drain: ending engines and servers.
STOP_MARGIN_S = 30.0

KEEPER_NAMESPACE = "kvferry"
# How long a worker waits for its node's keeper; it starts without it then, and finds it later.
KEEPER_START_S = 60.0
# Between two looks at a folder that a job fills.
FILL_PERIOD_S = 5.0
DELETE_TIMEOUT_S = 900
# Between two looks at an application that starts or ends.
STATUS_PERIOD_S = 0.5


class _WorkerReplica:
    """One worker in one Serve replica. Serve calls `check_health`, and the finalizer when it stops the replica."""

    kind: MemberKind

    async def __init__(  # type: ignore[misc]
        self,
        values: dict[str, Any],
        model_folder: str,
        *_others: Any,
        pool: str = "",
        member_pool: str | None = None,
        argument_keys: Mapping[str, str] | None = None,
        hub_model: Mapping[str, str] | None = None,
    ) -> None:
        config = _in_replica(values)
        # Before weights are waited for and read.
        check_quality_report(config, engine=config.engine_of(self.kind.value, pool))
        await _until_filled(model_folder, hub_model)
        keeper_socket = ""
        if config.volumes_of(pool) is not None:
            await ensure_keeper(values)
            keeper_socket = str(socket_path(config.tier))
        engine = build_engine(
            config, self.kind, model_folder, keeper_socket=keeper_socket, pool=pool, argument_keys=argument_keys
        )
        self._host = WorkerHost(config, self.kind, engine, _membership(config), pool, member_pool)
        try:
            await self._host.start()
        except BaseException:
            await self._host.stop()
            raise
        collector.collect_rarely()
        collector.freeze_loaded()

    async def check_health(self) -> None:
        await self._host.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_host"):
            await self._host.drain()
            await self._host.stop()


class PrefillWorker(_WorkerReplica):
    kind = MemberKind.PREFILL


class DecodeWorker(_WorkerReplica):
    kind = MemberKind.DECODE


class Gateway:
    _host: GatewayHost

    async def __init__(  # type: ignore[misc]
        self, values: dict[str, Any], model_folder: str, *_others: Any, hub_model: Mapping[str, str] | None = None
    ) -> None:
        _in_replica(values)
        self._values, self._model_folder = values, model_folder
        await _until_filled(model_folder, hub_model)
        use_cpu_platform()

    async def reconfigure(self, models: Mapping[str, Any]) -> None:
        """Called by Serve before the first request and whenever counts or models change, without a restart."""
        config = _in_replica(gateway_values(self._values, models))
        if hasattr(self, "_host"):
            await self._host.reconfigure(config)
            return
        self._host = GatewayHost(config, self._model_folder, _membership(config))
        try:
            await self._host.start()
        except BaseException:
            await self._host.stop()
            raise

    async def __del__(self) -> None:
        if hasattr(self, "_host"):
            await self._host.drain()
            await self._host.stop()


async def _until_filled(model_folder: str, hub_model: Mapping[str, str] | None) -> None:
    if hub_model is not None:
        name, revision = hub_model["name"], hub_model["revision"]
        # Not in a thread that asyncio waits for at its end: the replica may be told to go meanwhile.
        while why := await asyncio.to_thread(why_not_whole, Path(model_folder), name, revision):
            log.info("waiting for %s at %s: %s", name, revision, why)
            await asyncio.sleep(FILL_PERIOD_S)


def keeper_settings(values: dict[str, Any]) -> str:
    """Return a digest of all settings of a keeper; a keeper with another digest is replaced."""
    sections = [values[section] for section in ("tier", "membership", "metrics", "tracing")]
    # `cpu_gib` concerns engines alone, and each model may have its own.
    sections[0] = {key: value for key, value in sections[0].items() if key != "cpu_gib"}
    return _digest([*sections, values["worker"]["tls"], values["engine"]["device"], __version__])


async def ensure_keeper(values: dict[str, Any]) -> None:
    """Make sure that this node has a keeper with these settings, and wait up to KEEPER_START_S for it.

    Never raises: engines serve without a keeper and connect once it is there.
    """
    node_id = ray.get_runtime_context().get_node_id()
    try:
        async with asyncio.timeout(KEEPER_START_S):
            while True:
                keeper = (
                    ray.remote(satellites.keeper().KeeperActor)
                    .options(
                        name=f"keeper-{node_id}",
                        namespace=KEEPER_NAMESPACE,
                        get_if_exists=True,
                        lifetime="detached",
                        max_restarts=-1,
                        num_cpus=0,
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                    )
                    .remote(
                        values,
                        keeper_settings(values),
                        read_config=_in_replica,
                        membership=_membership,
                        is_deployed=_is_deployed,
                        end_actor=_end_this_actor,
                    )
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
        fault = f"it did not start within {KEEPER_START_S:g} s, or is replaced again and again"
    except ConfigError as error:  # the package of keepers is missing on this node alone
        fault = error.message
    if fault:
        log.error("this node's keeper does not serve: %s; pages of volumes are computed until it does", fault)


def _end_this_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _is_deployed() -> bool:
    """Whether Serve has the application; True if Serve cannot be asked."""
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        return any(map(_is_own, serve.status().applications))
    except ValueError:
        return False  # Serve is gone
    except Exception as error:
        log.warning("Serve cannot be asked for its applications: %s", error)
        return True


def _is_own(application: str) -> bool:
    return application == APPLICATION or application.startswith(APPLICATION_OF_ENTRY)


def application(args: Mapping[str, Any]) -> Application:
    """Build the application for `import_path: kvferry.app:application`.

    `args`: `config`, as in a YAML file, and `model_folder`, a folder or hub id that is the same on every node (default:
    the model's path); optionally `entry`, whose workers alone are built, and `hub_model`, `name` and `revision` of the
    model that a job puts there, for which replicas wait. Raises ConfigError.
    """
    if unknown := sorted(set(args) - {"config", "entry", "model_folder", "hub_model"}):
        raise ConfigError(f"args: unknown key {unknown[0]!r}. Allowed here: config, entry, hub_model, model_folder")
    values = args.get("config")
    if not isinstance(values, Mapping):
        raise ConfigError(f"args.config: expected a mapping of sections, not {values!r}")
    model_folder = args.get("model_folder", "")
    if not isinstance(model_folder, str):
        raise ConfigError(f"args.model_folder: expected a folder or a hub id, not {model_folder!r}")
    hub_model = args.get("hub_model")
    if hub_model is not None and not _is_hub_model(hub_model):
        raise ConfigError(f"args.hub_model: expected {{name: ..., revision: ...}}, two texts, not {hub_model!r}")
    config = _deployable(configuration.parse(values))
    if "entry" not in args:
        return build(config, model_folder, hub_model)
    if (name := args["entry"]) not in (names := [entry.name for entry in config.models]):
        raise ConfigError(
            f"args.entry: {str(name)[:80]!r} is no entry of args.config.models: {', '.join(names) or 'none'}"
        )
    return _tied(_parts_of(config, config.entry(name), model_folder, hub_model))


def _is_hub_model(value: object) -> bool:
    is_mapping = isinstance(value, Mapping) and set(value) == {"name", "revision"}
    return is_mapping and all(isinstance(each, str) and each for each in value.values())  # type: ignore[attr-defined]


def build(config: ClusterConfig, model_folder: str = "", hub_model: Mapping[str, str] | None = None) -> Application:
    model_folder = model_folder or config.model.path
    waits = _waits(hub_model)
    values = replica_values(config.of_model())
    version = _digest([values, model_folder, __version__, *(waits.values())])
    common = (values, model_folder, waits)
    parts = [
        _Part(deployment, *common, _options(role, version, drain_timeout_s=config.worker.drain_timeout_s), pool)
        for pool in ("", *sorted(config.pools))
        for deployment, role in _workers(config, pool)
    ]
    for entry in config.models:
        parts += _parts_of(config, entry)
    if config.gateway.replicas:
        gateway = RoleConfig(
            replicas=config.gateway.replicas, num_cpus=config.gateway.num_cpus, resources=config.gateway.resources
        )
        drain_timeout_s = config.gateway.linger_s + config.gateway.drain_timeout_s
        options = _options(gateway, version, drain_timeout_s=drain_timeout_s)
        options["user_config"] = _models(config)
        parts.append(_Part(Gateway, *common, options))
    return _tied(parts)


def _waits(hub_model: Mapping[str, str] | None) -> dict[str, Any]:
    return {"hub_model": dict(hub_model)} if hub_model else {}


def _tied(parts: list[_Part]) -> Application:
    if not parts:
        raise ConfigError(
            "prefill.replicas, decode.replicas, gateway.replicas: all are 0, so there is nothing to serve"
        )
    application: Application | None = None
    for part in parts:
        # Each is bound into the next one only to tie them into one application.
        application = part.bound(*(() if application is None else (application,)))
    assert application is not None
    return application


@dataclass(frozen=True, slots=True)
class _Part:
    kind: type
    values: dict[str, Any]
    model_folder: str
    waits: dict[str, Any]
    options: dict[str, Any]
    pool: str = ""
    member_pool: str = ""
    argument_keys: Mapping[str, str] = field(default_factory=dict)

    def bound(self, *others: Application) -> Application:
        names = ("pool", "member_pool", "argument_keys")
        own = {name: value for name in names if (value := getattr(self, name))}
        named = {"name": f"{self.kind.__name__}-{self.pool}"} if self.pool else {}
        deployment = serve.deployment(self.kind).options(**self.options, **named, _internal=True)
        return deployment.bind(self.values, self.model_folder, *others, **own, **self.waits)


def _workers(config: ClusterConfig, pool: str) -> list[tuple[type[_WorkerReplica], RoleConfig]]:
    roles = [(kind, config.role_of(kind.kind.value, pool)) for kind in (PrefillWorker, DecodeWorker)]
    return [(kind, role) for kind, role in roles if role.replicas]


def _parts_of(
    config: ClusterConfig, entry: ModelEntryConfig, folder: str = "", hub_model: Mapping[str, str] | None = None
) -> list[_Part]:
    # Nothing of other models is in their versions.
    own, waits = config.of_model(entry.name), _waits(hub_model)
    values, folder = replica_values(own), folder or own.model.path
    version = _digest([values, folder, __version__, *(waits.values())])
    options = {"drain_timeout_s": own.worker.drain_timeout_s}
    return [
        _Part(
            *(kind, values, folder, waits, _options(role, version, **options), entry.name, entry.pool),
            argument_keys=config.argument_keys(kind.kind.value, entry.name),
        )
        for kind, role in _workers(own, entry.name)
    ]


def _models(config: ClusterConfig) -> dict[str, Any]:
    """Return what a gateway follows while it serves: counts of workers, models and names."""
    values = config.model_dump(mode="json")
    found: dict[str, Any] = _counts(config, "")
    if config.pools:
        found["pools"] = {pool: _counts(config, pool) for pool in config.pools}
    if names := {key: values["model"][key] for key in ("aliases", "canary") if values["model"][key]}:
        found["model"] = names
    if config.models:
        found["models"] = values["models"]
    return found


def gateway_values(values: Mapping[str, Any], models: Mapping[str, Any]) -> dict[str, Any]:
    """Return a gateway's whole configuration, of its replica's `values` and `models` (see `_models`)."""
    found: dict[str, Any] = json.loads(json.dumps(values))
    found["models"] = models.get("models", [])
    found["model"] |= models.get("model", {})
    named = models.get("pools", {})
    found["pools"] = {pool: section for pool, section in found["pools"].items() if pool in named}
    for counts, sections in ((models, found), *((named[pool], found["pools"][pool]) for pool in found["pools"])):
        for role in ROLES:
            sections[role]["replicas"] = counts[role]
    return found


def _counts(config: ClusterConfig, pool: str) -> dict[str, Any]:
    return {role: config.role_of(role, pool).replicas for role in ROLES}


def replica_values(config: ClusterConfig) -> dict[str, Any]:
    """Return the configuration that replicas are made from: without counts and placement, which are Serve's.

    Serve replaces replicas whose values change. Of a count only the fact that it is 0 remains.
    """
    values = config.model_dump(mode="json")
    pools = values["pools"].values()
    for section in (values["gateway"], *(each[role] for each in (values, *pools) for role in ROLES)):
        section["replicas"] = min(1, section["replicas"])
        for key in ("num_cpus", "num_gpus", "resources"):
            section.pop(key, None)
    return values


def deploy(config: ClusterConfig, model_folder: str, ray_address: str, *, wait_s: float = 0) -> None:
    """Submit the application to a running Ray. Serve and the application outlive this process.

    Waits up to `wait_s` until every replica serves; raises KvferryError if that fails or takes longer.
    """
    application = build(_deployable(config), model_folder)
    with _connected(ray_address):
        # Serve's own proxies would listen for traffic that never comes.
        serve.start(proxy_location="Disabled", http_options={"host": "127.0.0.1", "location": "NoServer"})
        serve.run_many(
            [RunTarget(target=application, name=APPLICATION, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        if wait_s:
            _wait_running(time.monotonic() + wait_s)


def delete(ray_address: str) -> None:
    """Drain and end the application, and those of entries, where they are. Others of the same Ray stay."""
    with _connected(ray_address):
        for name in filter(_is_own, serve.status().applications):
            serve.delete(name, _blocking=False)  # they drain at the same time
        deadline_s = time.monotonic() + DELETE_TIMEOUT_S
        while left := sorted(filter(_is_own, serve.status().applications)):
            if time.monotonic() >= deadline_s:
                raise KvferryError(f"after {DELETE_TIMEOUT_S} s these still drain, and go on: {', '.join(left)}")
            time.sleep(STATUS_PERIOD_S)


def _deployable(config: ClusterConfig) -> ClusterConfig:
    if not config.membership.endpoints:
        raise ConfigError("membership.endpoints: etcd's addresses are needed to deploy, such as [etcd:2379]")
    if config.tier.volumes:
        satellites.keeper()  # before a replica needs it
    return config


@contextlib.contextmanager
def _connected(ray_address: str) -> Iterator[None]:
    try:
        ray.init(address=ray_address, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ConfigError(f"--ray-address {ray_address}: no Ray answers there: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


_FINAL_TRIGGERS = frozenset({"REPLICA_STARTUP_FAILED", "DEPLOYMENT_ACTOR_FAILED"})


def _wait_running(deadline_s: float) -> None:
    shown = ""
    while True:
        try:
            status = serve.status().applications.get(APPLICATION)
        except RayError as error:  # while Ray restarts Serve's controller
            if time.monotonic() >= deadline_s:
                raise KvferryError(f"Ray Serve cannot be asked for its state: {cause_of(str(error))}") from None
            time.sleep(STATUS_PERIOD_S)
            continue
        state = status.status.value if status is not None else "DELETED"
        if state == "RUNNING":
            return
        unready = {
            name: deployment.message
            for name, deployment in (status.deployments if status is not None else {}).items()
            if deployment.status.value != "HEALTHY"
        }
        detail = causes_of(unready) or cause_of(status.message if status is not None else "")
        # Serve makes new replicas for one that is UNHEALTHY, and also where it says DEPLOY_FAILED of one that ran.
        triggers = {each.status_trigger.value for each in status.deployments.values()} if status is not None else set()
        is_over = bool(triggers & _FINAL_TRIGGERS) or "HEALTH_CHECK_FAILED" not in triggers
        if state in ("DELETING", "DELETED") or (state == "DEPLOY_FAILED" and is_over):
            raise KvferryError(f"{GIVEN_UP}the application is {state}: {detail}")
        if time.monotonic() >= deadline_s:
            raise KvferryError(f"the application is still {state}: {detail}")
        if detail != shown:
            shown = detail
            print(CAUSE_MARK + detail, flush=True)
        time.sleep(STATUS_PERIOD_S)


def _digest(parts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _options(role: RoleConfig, version: str, *, drain_timeout_s: float) -> dict[str, Any]:
    return {
        # Serve gives a deployment without one a random version, and replaces every replica at each `run`. Files for
        # `serve deploy` have the digest of their arguments instead.
        "version": version,
        "num_replicas": role.replicas,
        "ray_actor_options": {
            "num_cpus": role.num_cpus,
            "num_gpus": role.num_gpus,
            "resources": dict(role.resources),
            # Else a job's working folder, whose address changes with every file in it, would become part of each
            # deployment, and each job replace every replica. Replicas need nothing of it.
            "runtime_env": {"working_dir": None},
        },
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": drain_timeout_s + STOP_MARGIN_S,
    }


def _membership(config: ClusterConfig) -> Membership:
    return EtcdMembership(config.membership)


def _in_replica(values: dict[str, Any]) -> ClusterConfig:
    # Ray knows this node by an address that the others reach; `auto` stands for it.
    address = os.environ.get(NODE_ADDRESS_VARIABLE) or ray.util.get_node_ip_address()
    config = configuration.parse(values).on_node(address)
    close_handle_server()
    logging.basicConfig(
        level=config.log_level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    return config


def close_handle_server() -> None:
    """Keep Serve from opening its handle server: it listens on all interfaces and unpickles unauthenticated requests.

    kvferry uses no handles. Must run before the replica's constructor returns (ray.serve._private.replica).
    """
    if not hasattr(replica, "add_port_to_grpc_server"):
        raise ConfigError("this version of Ray Serve opens its handle server in a way kvferry cannot close")
    replica.add_port_to_grpc_server = lambda server, address: 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvferry.app", description="Deploy kvferry to a running Ray.")
    commands = parser.add_subparsers(dest="command", required=True)
    deploying = commands.add_parser("deploy", help="submit the application, which outlives this command")
    deploying.add_argument("--config", type=Path, required=True, help="a YAML configuration with membership.endpoints")
    deploying.add_argument("--model-folder", default="", help="the model's folder, the same string on every node")
    deploying.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, as for `up`")
    deploying.add_argument("--wait", type=float, default=0, metavar="SECONDS", help="wait until every replica serves")
    deleting = commands.add_parser("delete", help="drain and end the application")
    for command in (deploying, deleting):
        command.add_argument(
            "--ray-address",
            default=os.environ.get("RAY_ADDRESS", "auto"),
            help="host:port of the running Ray; by default $RAY_ADDRESS, else the Ray of this machine",
        )
    arguments = parser.parse_args()
    try:
        if arguments.command == "delete":
            delete(arguments.ray_address)
        else:
            config = configuration.load(arguments.config, flags=arguments.set)
            deploy(config, arguments.model_folder, arguments.ray_address, wait_s=arguments.wait)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    except KvferryError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Under its import path, so that replicas import these classes instead of getting them by value.
    from kvferry import app

    sys.exit(app.main())
