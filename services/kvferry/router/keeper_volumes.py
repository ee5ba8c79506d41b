"""All keepers' volumes: residency and read costs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from kvferry.config import TlsConfig
from kvferry.errors import KvferryError
from kvferry.keeper.volume_state import VolumeState
from kvferry.membership.base import Member, MemberId, MemberKind, Membership
from kvferry.membership.follower import MemberFollower
from kvferry.mutual_tls import channel_to
from kvferry.residency.codec import residency_from_wire
from kvferry.residency.feed import Delta, ResidencyFollower, SnapshotPart
from kvferry.residency.index import ResidencyIndex
from kvferry.router.prices.pricing import NO_VOLUMES, VolumeCosts
from kvferry.router.prices.rates import CostDefaults
from kvferry.util.grpc_options import CHANNEL_OPTIONS
from kvferry.util.task_set import TaskSet
from kvferry.wire.v1 import keeper_pb2 as pb

log = logging.getLogger(__name__)

REDIAL_FIRST_S = 0.1
REDIAL_MOST_S = 3.0

_SEPARATOR = "@"


VolumeUpdate = SnapshotPart | Delta | VolumeState
# Opens the stream of a volume of a keeper. It ends, or raises OSError or KvferryError, when it breaks.
FollowVolume = Callable[[Member, str], AsyncIterator[VolumeUpdate]]


class KeeperVolumes:
    def __init__(
        self,
        membership: Membership,
        index: ResidencyIndex,
        follow: FollowVolume,
    ) -> None:
        self._follower = MemberFollower(membership, (MemberKind.KEEPER,), on_joined=self._joined, on_left=self._left)
        self._index = index
        self._follow = follow
        self._keepers: dict[MemberId, tuple[Member, list[asyncio.Task[None]]]] = {}
        self._gone: set[MemberId] = set()  # left the registry
        self._ending = TaskSet()
        self._costs: dict[str, dict[str, VolumeCosts]] = {}  # by the pool that uses them
        self._states: dict[str, VolumeState] = {}
        self.num_gaps = 0

    def __repr__(self) -> str:
        names = sorted(name for costs in self._costs.values() for name in costs)
        return f"<KeeperVolumes of {len(self._keepers)}, reading from {names}>"

    def start(self) -> None:
        self._follower.start()

    def costs(self, pool: str | None = "") -> Mapping[str, VolumeCosts]:
        """Return the readable volumes of a pool, by their names in the index (see `volume_of`); none for None."""
        return NO_VOLUMES if pool is None else self._costs.get(pool, NO_VOLUMES)

    def states(self) -> Mapping[str, VolumeState]:
        """Return the last report of every volume that is followed now."""
        return self._states

    async def close(self) -> None:
        await self._follower.close()
        for member_id in list(self._keepers):
            self._drop(member_id)
        await self._ending.wait()

    def _joined(self, member: Member) -> None:
        self._gone.discard(member.member_id)
        known = self._keepers.get(member.member_id)
        if known is not None and not all(task.done() for task in known[1]):
            if (known[0].address, known[0].volumes) == (member.address, member.volumes):
                self._keepers[member.member_id] = (member, known[1])
                return
            self._drop(member.member_id)
        tasks = [asyncio.create_task(self._keep_following(member, volume_id)) for volume_id in member.volumes]
        self._keepers[member.member_id] = (member, tasks)

    def _left(self, member_id: MemberId) -> None:
        if member_id in self._keepers:
            self._gone.add(member_id)

    def _drop(self, member_id: MemberId) -> None:
        self._gone.discard(member_id)
        _, tasks = self._keepers.pop(member_id, (None, []))
        for task in tasks:
            task.cancel()
            self._ending.add(task)

    async def _keep_following(self, member: Member, volume_id: str) -> None:
        name = f"{volume_id}{_SEPARATOR}{member.member_id}"
        follower = ResidencyFollower(self._index, name)
        pause_s = REDIAL_FIRST_S
        try:
            while True:
                try:
                    async for update in self._follow(member, volume_id):
                        pause_s = REDIAL_FIRST_S
                        if not self._apply(name, member, follower, update):
                            break
                except (OSError, KvferryError) as error:
                    log.debug("no word from keeper %s of volume %s: %s", member.member_id, volume_id, error)
                # The chunks of the volume cannot be loaded through this keeper now.
                self._forget(name, follower)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                if member.member_id in self._gone:
                    return
                pause_s = min(pause_s * 2, REDIAL_MOST_S)
        except Exception:
            log.exception("following volume %s of keeper %s failed", volume_id, member.member_id)
        finally:
            self._forget(name, follower)

    def _apply(self, name: str, member: Member, follower: ResidencyFollower, update: VolumeUpdate) -> bool:
        """Returns False after a gap: the stream must begin anew."""
        match update:
            case VolumeState():
                self._states[name] = update
                self._index.set_blocks_per_chunk(name, update.blocks_per_chunk)
                self._forget_costs(name)
                if update.is_readable:
                    self._costs.setdefault(update.pool, {})[name] = self._costs_of(member, update)
            case SnapshotPart():
                follower.apply_part(update)
            case Delta():
                waited = follower.needs_snapshot
                follower.apply_delta(update)
                if follower.needs_snapshot and not waited:
                    self.num_gaps += 1
                    log.warning("the residency of volume %s has a gap; asking for a snapshot", name)
                    return False
        return True

    def _forget(self, name: str, follower: ResidencyFollower) -> None:
        self._forget_costs(name)
        self._states.pop(name, None)
        self._index.set_blocks_per_chunk(name, 1)
        follower.drop()

    def _forget_costs(self, name: str) -> None:
        for pool, costs in list(self._costs.items()):
            if costs.pop(name, None) is not None and not costs:
                del self._costs[pool]

    def _costs_of(self, member: Member, state: VolumeState) -> VolumeCosts:
        rate = state.read_bytes_per_s
        if rate <= 0 or state.chunk_bytes <= 0:
            return VolumeCosts(frozenset((member.node,)), CostDefaults().volume_page_ms, 0.0)
        ms_per_byte = 1e3 / rate
        page_ms = state.chunk_bytes / state.blocks_per_chunk * ms_per_byte
        return VolumeCosts(frozenset((member.node,)), page_ms, state.queue_bytes * ms_per_byte)


def volume_of(name: str) -> str:
    return name.partition(_SEPARATOR)[0]


def keeper_of(name: str) -> MemberId:
    return MemberId(name.partition(_SEPARATOR)[2])


_FOLLOW = "/kvferry.wire.v1.Keeper/Follow"


def follow_over(tls: TlsConfig) -> FollowVolume:
    """The streams raise ConnectionError when they break."""

    async def follow(member: Member, volume_id: str) -> AsyncIterator[VolumeUpdate]:
        async with channel_to(member.address, tls, CHANNEL_OPTIONS) as channel:
            call: Any = channel.unary_stream(
                _FOLLOW,
                request_serializer=pb.FollowRequest.SerializeToString,
                response_deserializer=pb.VolumeUpdate.FromString,
            )(pb.FollowRequest(volume_id=volume_id))
            try:
                async for message in call:
                    yield update_from_wire(message)
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from None
            except ValueError as error:
                raise ConnectionError(f"a message that cannot be read: {error}") from None
            finally:
                call.cancel()

    return follow


def update_from_wire(message: pb.VolumeUpdate) -> VolumeUpdate:
    """Raises ValueError."""
    match message.WhichOneof("kind"):
        case "residency":
            return residency_from_wire(message.residency)
        case "state":
            return VolumeState.from_wire(message.state)
        case _:
            raise ValueError("an empty update")
