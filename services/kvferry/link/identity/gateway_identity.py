"""What a gateway says of itself. Pure."""

from __future__ import annotations

import dataclasses

from kvferry.link.identity.protocol import Identity
from kvferry.membership.base import MemberId


class GatewayIdentity:
    """Without weights of its own, a gateway has those of the first linked worker, until all with them have left."""

    # So an answer goes on with the weights that began it.

    def __init__(self, own: Identity | None = None) -> None:
        self._own = own or Identity()
        self._worker_to_weights: dict[MemberId, str] = {}  # all equal

    def __repr__(self) -> str:
        return f"<GatewayIdentity {self.current().model} of {sorted(self._worker_to_weights)}>"

    def current(self) -> Identity:
        if self._own.model.weights or not self._worker_to_weights:
            return self._own
        weights = next(iter(self._worker_to_weights.values()))
        return dataclasses.replace(self._own, model=dataclasses.replace(self._own.model, weights=weights))

    def linked(self, worker_id: MemberId, worker: Identity) -> None:
        """`worker` is compatible with `current`."""
        if worker.model.weights:
            self._worker_to_weights[worker_id] = worker.model.weights

    def left(self, worker_id: MemberId) -> None:
        # Of the cluster: a worker that is only disconnected may come back.
        self._worker_to_weights.pop(worker_id, None)

    def check(self) -> None:
        assert len(set(self._worker_to_weights.values())) <= 1, self
