"""The gRPC stream in which a keeper reports one volume."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvferry.config import TlsConfig
from kvferry.keeper.volumes.volume_state import VolumeState
from kvferry.membership.base import Member
from kvferry.mutual_tls import channel_to
from kvferry.residency.codec import residency_from_wire
from kvferry.router.volume_pool import FollowVolume, VolumeUpdate
from kvferry.util.grpc_options import CHANNEL_OPTIONS
from kvferry.wire.v1 import keeper_pb2 as pb

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
