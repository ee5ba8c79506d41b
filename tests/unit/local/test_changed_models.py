"""What of a running cluster `kvferry up` changes, and what it refuses to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvferry.config import parse
from kvferry.errors import ConfigError
from kvferry_local.cluster import AlreadyRunning, with_other_models
from kvferry_local.run_folder import ClusterRecord

VALUES: dict[str, Any] = {"engine": {"kind": "sim"}, "models": [{"name": "a"}, {"name": "b"}]}


def asked(**changes: Any) -> Any:
    return parse({**VALUES, **changes})


def record() -> ClusterRecord:
    config = parse({**VALUES, "gateway": {"http_port": 8123}, "membership": {"endpoints": ["127.0.0.1:2379"]}})
    return ClusterRecord(
        name="kvferry",
        ready=True,
        started_unix_s=0.0,
        url="",
        etcd_endpoints=(),
        ray_address="",
        pillars=(),
        config=config.model_dump(mode="json"),
        asked=asked().model_dump(mode="json"),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"models": [{"name": "a"}, {"name": "c"}]},
        {"models": []},
        {"models": [{"name": "a", "model": {"canary": {"b": 5}}}, {"name": "b"}]},
        {"model": {"aliases": ["x"]}},
        {"model": {"canary": {"b": 5}}},
    ],
)
def test_models_and_names_change_and_places_stay(changes: dict[str, Any]) -> None:
    changed = with_other_models(record(), asked(**changes))
    assert changed is not None
    wanted = asked(**changes)
    assert (changed.models, changed.model) == (wanted.models, wanted.model)
    assert (changed.gateway.http_port, changed.membership.endpoints) == (8123, ("127.0.0.1:2379",))


def test_the_same_models_are_no_change() -> None:
    assert with_other_models(record(), asked()) is None
    assert with_other_models(record(), asked(log_level="DEBUG")) is None, (
        "a cluster runs already, whatever else is asked"
    )
    of_an_older_release = dataclasses.replace(record(), asked={})
    assert with_other_models(of_an_older_release, asked(models=[])) is None


def test_a_running_cluster_names_the_setting_that_it_keeps() -> None:
    said = AlreadyRunning.beside(record(), asked(adapters={"max_rank": 8})).message
    assert "already runs at  and keeps its value of adapters.max_rank" in said
    assert "keeps" not in AlreadyRunning.beside(record(), asked()).message
    of_an_older_release = dataclasses.replace(record(), asked={})
    assert "keeps" not in AlreadyRunning.beside(of_an_older_release, asked(log_level="DEBUG")).message


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"log_level": "DEBUG"}, "log_level"),
        ({"gateway": {"jwt": {"algorithms": ["RS256"]}}}, "gateway.jwt.algorithms"),
        ({"model": {"path": "x", "aliases": ["y"]}}, "model.path"),
        ({"pools": {"p": {}}}, "pools.p"),
        ({"decode": {"replicas": 0}}, "decode.replicas"),
    ],
)
def test_other_settings_do_not_change_with_the_models(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=r"only `models`, `model.aliases` and `model.canary` change") as refused:
        with_other_models(record(), asked(models=[], **changes))
    assert refused.value.message.startswith(f"{key}: the cluster 'kvferry' runs with another value")
