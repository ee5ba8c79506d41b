"""Comparison of both ends of a link before requests pass: protocol, cluster and model. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from kvferry.config import MAX_ADAPTERS, is_of_entry
from kvferry.membership.base import MemberId
from kvferry.wire.v1 import worker_pb2 as pb

# Releases may differ while a cluster is upgraded. Ends of one cluster and model use the highest version of the protocol
# that both speak; an end skips messages of a kind that it does not know, and sends those of a feature only to an end
# that names it. Version 1 is the release before there were versions: it says nothing, and knows no feature.

OLDEST_VERSION = 1
NEWEST_VERSION = 2

RESERVE = "reserve"  # places of decode workers, before a prompt is computed
QUARANTINE = "quarantine"  # requests that workers pass on to all gateways
QUARANTINE_KNOWN = "quarantine-known"  # answers to that, where one is asked for
REPLAY = "replay"  # of an answer's tokens in its grammar, when it goes on: asked for by an earlier release
CONTINUE = "continue"  # an answer from its tokens, with the penalties, the grammar and the noise that it has there
POOLS = "pools"  # of workers: requests name theirs, and gateways keep to those of tenants
ADAPTERS = "adapters"  # LoRA: requests name theirs, and workers refuse one that they do not have
IMAGES = "images"  # of prompts: a worker without it would compute their placeholder tokens as text
FEATURES = (RESERVE, QUARANTINE, QUARANTINE_KNOWN, REPLAY, CONTINUE, POOLS, ADAPTERS, IMAGES)

_MAX_FEATURES = 64  # that a peer may name


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Empty values are not compared, but for overrides: a gateway may have a tokenizer only."""

    served_name: str = ""
    tokenizer: str = ""  # digest of the tokenizer's files
    weights: str = ""  # `model.revision`, or a digest of the weight files
    overrides: str = ""  # `model.hf_overrides`, as JSON

    def to_wire(self) -> pb.Model:
        return pb.Model(
            served_name=self.served_name, tokenizer=self.tokenizer, weights=self.weights, overrides=self.overrides
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of one end. An empty cluster is not compared: version 1 did not send it."""

    cluster: str = ""
    model: ServedModel = ServedModel()
    oldest: int = OLDEST_VERSION
    newest: int = NEWEST_VERSION
    features: frozenset[str] = frozenset(FEATURES)

    def protocol(self) -> pb.Protocol:
        return pb.Protocol(oldest=self.oldest, newest=self.newest, features=sorted(self.features))


def identity_of(said: pb.Hello | pb.Welcome) -> Identity:
    model = said.model if isinstance(said, pb.Hello) else said.served
    protocol = said.protocol
    is_versioned = said.HasField("protocol")
    return Identity(
        said.cluster,
        ServedModel(model.served_name, model.tokenizer, model.weights, model.overrides),
        protocol.oldest if is_versioned else 1,
        protocol.newest if is_versioned else 1,
        frozenset(protocol.features[:_MAX_FEATURES]),
    )


def why_refused(welcome: pb.Welcome, pool: str) -> str:
    """Return why a worker takes nothing, or why nothing is sent to it: its record names another `pool`."""
    if welcome.refusal or welcome.pool == pool:
        return welcome.refusal
    return f"it is of {_named(welcome.pool)}, and its record says {_named(pool)}"


def why_other_pool(own: str, pool: str) -> str:
    """Return why a worker of pool `own` takes no request of `pool`; empty if it does."""
    return "" if own == pool else f"it is of {_named(own)} and takes no request of {_named(pool)}"


def adapters_of(welcome: pb.Welcome) -> frozenset[str]:
    # A worker without the feature ignores a request's adapter.
    if ADAPTERS not in welcome.protocol.features:
        return frozenset()
    return frozenset(welcome.adapters[:MAX_ADAPTERS])


def why_no_adapter(own: Collection[str], message: pb.Submit | pb.Reserve) -> str:
    """Return why a worker with `own` adapters takes no such request, or an empty string."""
    if isinstance(message, pb.Reserve) or not message.adapter or message.adapter in own:
        return ""
    name = message.adapter.rpartition("@")[0]
    if any(each.startswith(f"{name}@") for each in own):
        return f"its adapter {name[:64]!r} has other files than the one that the request began with"
    return f"it has no adapter {name[:64]!r}"


def _named(pool: str) -> str:
    kind = "model" if is_of_entry(pool) else "pool"
    return f"{kind} {pool[:64]!r}" if pool else "the default pool"


def why_incompatible(own: Identity, peer: Identity) -> str:
    """Return what keeps two ends apart, as `its ... , here ...`; empty if nothing does."""
    if max(own.oldest, peer.oldest) > min(own.newest, peer.newest):
        return (
            f"it speaks versions {peer.oldest} to {peer.newest} of the protocol, "
            f"and this end {own.oldest} to {own.newest}"
        )
    for name, theirs, ours in (
        ("cluster", peer.cluster, own.cluster),
        ("model", peer.model.served_name, own.model.served_name),
        ("tokenizer", peer.model.tokenizer, own.model.tokenizer),
        ("weights revision", peer.model.weights, own.model.weights),
    ):
        if theirs and ours and theirs != ours:
            return f"its {name} is {theirs[:200]!r}, and here it is {ours!r}"
    theirs, ours = (end.model.overrides or "none" for end in (peer, own))
    return "" if theirs == ours else f"its model.hf_overrides is {theirs[:400]}, and here it is {ours}"


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
        # Called when a worker leaves the cluster: one that is only disconnected may come back.
        self._worker_to_weights.pop(worker_id, None)

    def check(self) -> None:
        assert len(set(self._worker_to_weights.values())) <= 1, self
