"""What two ends of a link compare."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.config import MAX_ADAPTERS
from kvferry.link.identity import (
    ADAPTERS,
    NEWEST_VERSION,
    Identity,
    ServedModel,
    adapters_of,
    identity_of,
    why_incompatible,
    why_no_adapter,
)
from kvferry.wire.v1 import worker_pb2 as pb

HERE = Identity("blue", ServedModel("llama", "t1", "w1"))


def hello(identity: Identity) -> pb.Hello:
    return pb.Hello(
        gateway_id="g", protocol=identity.protocol(), cluster=identity.cluster, model=identity.model.to_wire()
    )


def test_an_identity_passes_the_wire() -> None:
    assert identity_of(hello(HERE)) == HERE
    welcome = pb.Welcome(protocol=HERE.protocol(), cluster=HERE.cluster, served=HERE.model.to_wire())
    assert identity_of(welcome) == HERE


def test_a_release_that_says_nothing_speaks_version_1_and_knows_no_feature() -> None:
    peer = identity_of(pb.Hello(gateway_id="g", version="0.1.0"))
    assert peer == Identity(oldest=1, newest=1, features=frozenset())
    assert why_incompatible(HERE, peer) == ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cluster": "green"}, "cluster is 'green', and here it is 'blue'"),
        ({"model": ServedModel("other", "t1", "w1")}, "model is 'other'"),
        ({"model": ServedModel("llama", "t2", "w1")}, "tokenizer is 't2'"),
        ({"model": ServedModel("llama", "t1", "w2")}, "weights revision is 'w2'"),
        ({"model": ServedModel("llama", "t1", "w1", "{}")}, "model.hf_overrides is {}, and here it is none"),
        ({"oldest": NEWEST_VERSION + 1, "newest": NEWEST_VERSION + 3}, f"versions {NEWEST_VERSION + 1} to"),
    ],
)
def test_differences_are_found_from_both_ends(change: dict[str, object], named: str) -> None:
    peer = dataclasses.replace(HERE, **change)  # type: ignore[arg-type]
    assert named in why_incompatible(HERE, peer)
    assert why_incompatible(peer, HERE)


@pytest.mark.parametrize("absent", ["served_name", "tokenizer", "weights"])
def test_an_empty_value_is_not_compared(absent: str) -> None:
    peer = dataclasses.replace(HERE, model=dataclasses.replace(HERE.model, **{absent: ""}))
    assert why_incompatible(HERE, peer) == why_incompatible(peer, HERE) == ""


def test_versions_that_overlap_are_enough() -> None:
    newer = dataclasses.replace(HERE, oldest=NEWEST_VERSION, newest=NEWEST_VERSION + 5)
    assert why_incompatible(HERE, newer) == ""


def test_a_peer_cannot_name_features_or_a_cluster_without_end() -> None:
    message = pb.Hello(cluster="x" * 10_000, protocol=pb.Protocol(oldest=1, newest=2, features=map(str, range(500))))
    peer = identity_of(message)
    assert len(peer.features) == 64
    assert len(why_incompatible(HERE, peer)) < 400


def test_adapters_of_a_release_that_ignores_them_are_none() -> None:
    new = Identity().protocol()
    old = pb.Protocol(oldest=1, newest=2, features=[each for each in new.features if each != ADAPTERS])
    adapters = ["sql@00", "poems@11"]
    assert adapters_of(pb.Welcome(protocol=new, adapters=adapters)) == set(adapters)
    assert adapters_of(pb.Welcome(protocol=old, adapters=adapters)) == frozenset()
    many = [f"a{i}@00" for i in range(MAX_ADAPTERS + 1)]
    assert len(adapters_of(pb.Welcome(protocol=new, adapters=many))) == MAX_ADAPTERS


@pytest.mark.parametrize(
    ("own", "adapter", "why"),
    [
        ([], "", ""),
        (["sql@00"], "", ""),
        (["sql@00"], "sql@00", ""),
        ([], "sql@00", "it has no adapter 'sql'"),
        (["sqlite@00"], "sql@00", "it has no adapter 'sql'"),
        (["sql@11"], "sql@00", "its adapter 'sql' has other files than the one that the request began with"),
    ],
)
def test_an_adapter_is_its_name_and_its_files(own: list[str], adapter: str, why: str) -> None:
    assert why_no_adapter(own, pb.Submit(adapter=adapter)) == why
    assert why_no_adapter(own, pb.Reserve()) == ""
