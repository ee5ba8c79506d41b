"""Takes changes of a Helm release to its Ray cluster, step by step, as long as it runs.

python -m kvferry_operator --config kvferry.yaml --namespace NAMESPACE --name NAME --state-folder FOLDER

One acts at a time, by a Lease. In the folder, `alive` is touched by each round, and `done` is there while nothing is
left to do. Exit code 0 after SIGTERM or SIGINT, 2 for a bad configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from kvferry import config as configuration
from kvferry.errors import ConfigError, UnavailableError
from kvferry.membership.base import WORKER_KINDS, Membership
from kvferry.membership.etcd import EtcdMembership
from kvferry_operator.kubernetes_api import KubernetesApi, api_client, normal_address
from kvferry_operator.lease import Lease, must_hold
from kvferry_operator.plan import Blocked, DeletePods, Done, Observed, SetSpec, Step, Wait, next_step, worker_group

ROUND_S = 5.0
# KubeRay may show what Serve said before the last change for one reconcile.
DONE_ROUNDS = 3
# As long as workers register again after etcd has lost them, and most of them load.
IDLE_S = 120.0

log = logging.getLogger(__name__)


class Rollout:
    def __init__(
        self,
        api: KubernetesApi,
        membership: Membership,
        state_folder: Path,
        *,
        release: str = "",
        identity: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`release` is the digest of the release to wait for; empty: any. `identity` is this pod's name."""
        self._api = api
        self._lease = Lease(api, identity or socket.gethostname(), monotonic=monotonic)
        self._monotonic = monotonic
        self._idle_since_s: dict[str, float] = {}  # by uid of pods without a worker
        self._membership = membership
        self._release = release
        self._num_done = 0
        self._alive = state_folder / "alive"
        self._done = state_folder / "done"
        self._said: tuple[str, str] | None = None
        for file in (self._alive, self._done):
            file.unlink(missing_ok=True)  # of a process before this one

    async def round(self) -> Step:
        """Takes and returns one step."""
        try:
            step = await self._step()
        except (UnavailableError, ConfigError) as error:
            step = Wait(str(error))
        except (LookupError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
            log.exception("an object cannot be read")
            step = Blocked(f"the RayService or its RayCluster cannot be read: {type(error).__name__}")
        self._num_done = self._num_done + 1 if isinstance(step, Done) else 0
        if self._num_done >= DONE_ROUNDS:
            self._done.touch()
        else:
            self._done.unlink(missing_ok=True)
        self._alive.touch()
        await self._say(step)
        return step

    async def _step(self) -> Step:
        seen = await asyncio.to_thread(self._api.observe)
        if self._release and self._api.release != self._release:
            # Not made yet, or over: the pod of the other release acts.
            await asyncio.to_thread(self._lease.release)
            return Wait("the API server does not show this release yet")
        was_held = self._lease.is_held
        other = await asyncio.to_thread(self._lease.take)
        if not other and not was_held:
            # What another one did until now is not in what was seen.
            seen = await asyncio.to_thread(self._api.observe)
        workers = await self._workers(seen)
        step = next_step(dataclasses.replace(seen, workers=workers, idle=self._idle(seen, workers)))
        if not other:
            await asyncio.to_thread(self._act, step)
        elif not isinstance(step, Done):
            return Wait(f"{other} rolls this release out: {words(step)[1]}")
        return step

    async def close(self) -> None:
        """Lets another rollout act at once."""
        with contextlib.suppress(UnavailableError):
            await asyncio.to_thread(self._lease.release)

    async def _workers(self, seen: Observed) -> Mapping[str, Mapping[str, int]]:
        uids = {(pod.group, pod.address): pod.uid for pod in seen.pods if pod.address}
        workers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for member in await self._membership.members():
            address = normal_address(member.address.rpartition(":")[0])
            # A pod may have the address of one that is gone, whose workers' leases have not run out.
            group = worker_group(member.kind.value, configuration.entry_of(member.pool))
            is_gone = member.pod_uid not in ("", uids.get((group, address), member.pod_uid))
            if member.kind in WORKER_KINDS and not is_gone:
                workers[group][address] += 1
        return workers

    def _idle(self, seen: Observed, workers: Mapping[str, Mapping[str, int]]) -> frozenset[str]:
        now_s = self._monotonic()
        without = [pod.uid for pod in seen.pods if pod.is_ready and not workers.get(pod.group, {}).get(pod.address)]
        self._idle_since_s = {uid: self._idle_since_s.get(uid, now_s) for uid in without}
        return frozenset(uid for uid, since_s in self._idle_since_s.items() if now_s - since_s >= IDLE_S)

    def _act(self, step: Step) -> None:
        if isinstance(step, SetSpec):
            must_hold(self._lease)
            self._api.set_spec(step)
        if isinstance(step, DeletePods):
            for pod in step.pods:
                must_hold(self._lease)
                self._api.delete_pod(pod)

    async def _say(self, step: Step) -> None:
        said = words(step)
        if said == self._said:
            return
        self._said = said
        log.log(logging.WARNING if said[0] == "Blocked" else logging.INFO, "%s: %s", *said)
        with contextlib.suppress(UnavailableError):
            await asyncio.to_thread(self._api.report, *said)


def words(step: Step) -> tuple[str, str]:
    """An event's reason and message."""
    if isinstance(step, Done):
        return "Done", "the Ray cluster is as the release says" + (f"; {step.left}" if step.left else "")
    if isinstance(step, DeletePods):
        return "ReplacingPods", f"{', '.join(pod.name for pod in step.pods)}: {step.why}"
    if isinstance(step, SetSpec):
        return "UpdatingCluster", step.why
    return ("Blocked" if isinstance(step, Blocked) else "Waiting"), step.why


async def run(rollout: Rollout, membership: EtcdMembership) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    try:
        while not stopping.is_set():
            await rollout.round()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await stopping.wait()
    finally:
        await rollout.close()
        await membership.close()


async def _main(arguments: argparse.Namespace) -> int:
    config = configuration.load(arguments.config)
    membership = EtcdMembership(config.membership)
    api = KubernetesApi(arguments.namespace, arguments.name, api_client())
    arguments.state_folder.mkdir(parents=True, exist_ok=True)
    rollout = Rollout(api, membership, arguments.state_folder, release=arguments.release, identity=arguments.identity)
    await run(rollout, membership)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvferry_operator", description="Take a release to its Ray cluster."
    )
    parser.add_argument("--config", type=Path, required=True, help="the cluster's configuration, with its etcd")
    parser.add_argument("--namespace", required=True, help="namespace of the RayService")
    parser.add_argument("--name", required=True, help="name of the RayService")
    parser.add_argument("--release", default="", help="digest of the release to wait for (kvferry.io/release)")
    parser.add_argument("--identity", default="", help="this pod's name; default: its host's")
    parser.add_argument("--state-folder", type=Path, required=True, help="where `alive` and `done` are kept")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return asyncio.run(_main(arguments))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
