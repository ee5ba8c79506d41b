"""Keeps the residency index true from the links' messages."""

from __future__ import annotations

import logging

from kvferry.link.worker_link import WorkerLink
from kvferry.residency.codec import residency_from_wire
from kvferry.residency.feed import Delta, ResidencyFollower
from kvferry.residency.index import ResidencyIndex
from kvferry.wire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)


class ResidencySubscriber:
    def __init__(self, index: ResidencyIndex) -> None:
        self.index = index
        self._followers: dict[WorkerLink, ResidencyFollower] = {}  # of links that are up

    def __repr__(self) -> str:
        return f"<ResidencySubscriber {self.index} of {len(self._followers)} workers>"

    @property
    def num_gaps(self) -> int:
        return sum(follower.num_gaps for follower in self._followers.values())

    def linked(self, link: WorkerLink) -> None:
        """Ask for a snapshot on a new link. Known pages stay until then."""
        self._followers[link] = ResidencyFollower(self.index, link.member.member_id)
        link.want_snapshot()

    def gone(self, link: WorkerLink) -> None:
        follower = self._followers.pop(link, None)
        if follower is not None:
            follower.drop()

    def received(self, link: WorkerLink, message: pb.Residency) -> None:
        follower = self._followers.get(link)
        if follower is None:
            return  # the worker was dropped, and its link is about to close
        waited = follower.needs_snapshot
        update = residency_from_wire(message)
        if isinstance(update, Delta):
            follower.apply_delta(update)
        else:
            follower.apply_part(update)
        if follower.needs_snapshot and not waited:
            log.warning("the residency of worker %s has a gap; asking for a snapshot", link.member.member_id)
            link.want_snapshot()
