"""`adapters` of the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry import config as configuration
from kvferry.config import MAX_ADAPTERS
from kvferry.errors import ConfigError


def parsed(adapters: dict[str, Any], **sections: Any) -> configuration.ClusterConfig:
    return configuration.parse({"model": {"path": "m"}, "adapters": adapters, **sections})


def test_folders_and_hub_ids_are_taken() -> None:
    served = {
        "sql": {"path": "/models/adapters/sql"},
        "A.b_c-9": {"path": "owner/name", "revision": "main", "tenants": ["acme"]},
    }
    adapters = parsed({"served": served, "max_active": 2, "max_loaded": 5}).adapters
    assert (adapters.num_loaded, adapters.max_rank) == (5, 16)
    assert adapters.served["A.b_c-9"].tenants == ("acme",)
    assert parsed({"max_active": 3}).adapters.num_loaded == 3


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ({"served": {"sql": {"path": "relative/to/here"}}}, r"served\.sql\.path: expected the absolute path"),
        ({"served": {"sql": {"path": "~/sql"}}}, r"served\.sql\.path: expected the absolute path"),
        ({"served": {"sql": {"path": ""}}}, r"served\.sql\.path"),
        ({"served": {"sql": {"path": "/a" + "b" * 1024}}}, r"served\.sql\.path"),
        ({"served": {"sql": {}}}, r"served\.sql\.path"),
        ({"served": {"sql": {"path": "/a", "revision": "r"}}}, "revision is of hub ids"),
        ({"served": {"sql": {"path": "/a", "tenants": ["t"] * 257}}}, "at most 256"),
        ({"served": {"sql": {"path": "/a", "tenant": "t"}}}, "did you mean 'tenants'"),
        ({"served": {"a:b": {"path": "/a"}}}, "adapter 'a:b': letters, digits"),
        ({"served": {"a@b": {"path": "/a"}}}, "adapter 'a@b': letters, digits"),
        ({"served": {"../a": {"path": "/a"}}}, "letters, digits"),
        ({"served": {"x" * 65: {"path": "/a"}}}, "at most 64"),
        ({"served": {f"a{i}": {"path": "/a"} for i in range(MAX_ADAPTERS + 1)}}, f"{MAX_ADAPTERS} is the limit"),
        ({"served": {"m": {"path": "/a"}}}, r"adapters\.served\.m: 'm' is the name of a model"),
        ({"max_rank": 12}, r"adapters\.max_rank"),
        ({"max_active": 0}, r"adapters\.max_active"),
        ({"max_active": 4, "max_loaded": 3}, r"max_loaded \(3\) must be at least max_active \(4\)"),
        ({"max_gib": 0}, r"adapters\.max_gib"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(adapters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parsed(adapters)
    assert len(caught.value.message) < 6000


@pytest.mark.parametrize(
    "sections",
    [
        {"models": [{"name": "second", "model": {"aliases": ["m:sql"]}}]},
        {"models": [{"name": "second"}], "pools": {"p": {"served_name": "m:sql"}}},
        {"models": [{"name": "second", "model": {"served_name": "n:sql"}}], "pools": {"p": {"served_name": "n"}}},
    ],
)
def test_a_model_has_no_name_by_which_an_adapter_is_asked_for(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"adapters\.served\.sql: '[mn]:sql', as it may be asked for"):
        parsed({"served": {"sql": {"path": "/a"}}}, **sections)
    assert parsed({"served": {"other": {"path": "/a"}}}, **sections)
    assert parsed({"served": {"sql": {"path": "/a"}}}, models=[{"name": "b", "model": {"aliases": ["b:sql"]}}])


def test_the_limit_of_adapters_is_allowed() -> None:
    served = {f"{i:064}": {"path": "/a"} for i in range(MAX_ADAPTERS)}
    assert len(parsed({"served": served}).adapters.served) == MAX_ADAPTERS


def test_several_ranks_of_one_engine_are_untested() -> None:
    served = {"served": {"sql": {"path": "/a"}}}
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size 2, only 1 is tested"):
        parsed(served, engine={"tensor_parallel_size": 2})
    assert parsed({}, engine={"tensor_parallel_size": 2}).adapters.served == {}


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("enable_lora", "adapters.served"),
        ("max_loras", "adapters.max_active"),
        ("max_cpu_loras", "adapters.max_loaded"),
        ("max_lora_rank", "adapters.max_rank"),
    ],
)
def test_vllms_own_arguments_name_the_key(argument: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{argument}: not accepted here: use {key}"):
        parsed({}, engine={"args": {argument: 1}})


def test_adapters_are_of_the_default_model() -> None:
    served = {"served": {"sql": {"path": "/a"}}}
    entry = {"name": "second", "model": {"path": "o", "aliases": ["also"], "served_name": "shown"}}
    config = configuration.parse({"models": [entry], "adapters": served})
    assert config.of_model("second").adapters.served == {}
    assert set(config.of_model().adapters.served) == {"sql"}
    for name in ("second", "also", "shown"):
        with pytest.raises(ConfigError, match=f"'{name}' is the name of a model"):
            configuration.parse({"models": [entry], "adapters": {"served": {name: {"path": "/a"}}}})
    none = {"replicas": 0}
    with pytest.raises(ConfigError, match="only the default model can have adapters"):
        configuration.parse({"models": [entry], "adapters": served, "prefill": none, "decode": none})


def test_adapters_beside_drafts_are_untested() -> None:
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    decode = {"engine": {"args": ngram}}
    with pytest.raises(ConfigError, match="beside speculative_config"):
        configuration.parse({"adapters": {"served": {"sql": {"path": "/a"}}}, "decode": decode})
