"""vllm_arguments.py and `engine.args`, `engine.env` of the configuration."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import config as configuration
from kvferry.arguments import vllm_arguments
from kvferry.arguments.vllm_arguments import FREE, KEYS_OF_ROLES, REFUSED, REFUSED_WITH_TIERS
from kvferry.errors import ConfigError
from support.engine_arguments import VALUES

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFTS = {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
# Arguments of vLLM that kvferry knows nothing about.
OTHERS = ["seed", "attention_backend", "compilation_config", "async_scheduling", "quantization", "max_num_active_seqs"]


def parsed(engine: dict[str, Any], **sections: Any) -> configuration.ClusterConfig:
    return configuration.parse({"model": {"path": "m"}, "engine": engine, **sections})


def fault(engine: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(engine, **sections)
    assert len(caught.value.message) < 1000
    return caught.value.message


@given(st.sampled_from(sorted([*REFUSED, *FREE, *OTHERS, *REFUSED_WITH_TIERS])), st.booleans())
def test_every_argument_is_taken_or_refused_by_its_rule(name: str, of_role: bool) -> None:
    args = {name: VALUES.get(name, 1)}
    engine: dict[str, Any] = {"device": "gpu"}
    sections = {"decode": {"engine": {"args": args}}} if of_role else {}
    values = engine if of_role else {**engine, "args": args}
    if name in FREE or not (of_role or name in REFUSED):
        assert parsed(values, **sections).engine_of("decode").args == args
        assert bool(vllm_arguments.equal_values(args, {})) is (name not in FREE)
    else:
        assert name in fault(values, **sections)


def test_a_roles_arguments_replace_those_of_both() -> None:
    config = parsed({"args": {"watermark": 0.02, "seed": 3}}, prefill={"engine": {"args": {"watermark": 0.05}}})
    assert config.engine_of("prefill").args == {"watermark": 0.05, "seed": 3}
    assert config.engine_of("decode").args == {"watermark": 0.02, "seed": 3}


def test_null_removes_an_argument_from_a_role() -> None:
    args = {"watermark": 0.02, "load_format": "safetensors", "seed": 3}
    config = parsed({"args": args}, decode={"engine": {"args": {"watermark": None, "load_format": None}}})
    assert config.engine_of("decode").args == {"seed": 3}
    assert config.engine_of("prefill").args == args
    assert config.argument_keys("decode") == {"seed": "engine.args.seed"}
    assert configuration.parse(config.model_dump(mode="json")) == config, "workers read it again"


@pytest.mark.parametrize(
    ("args", "name", "words"),
    [
        ({}, "watermrk", "watermrk: null removes nothing: engine.args has no such argument"),
        ({"watermark": 0.1}, "kv_cache_metrics", "kv_cache_metrics: null removes nothing"),
        ({}, "max_num_seqs", "max_num_seqs: not accepted here: use engine.max_num_seqs"),
        ({"seed": 3}, "seed", "seed: both roles need the same: remove it in engine.args"),
        ({"load_format": "dummy"}, "load_format", "load_format: both roles need the same: remove it in engine.args"),
        ({"speculative_config": None}, "speculative_config", "engine.args: speculative_config: it has no value"),
    ],
)
def test_null_is_refused_where_it_removes_nothing_that_a_role_may_choose(
    args: dict[str, Any], name: str, words: str
) -> None:
    assert words in fault({"args": args}, decode={"engine": {"args": {name: None}}})


def test_null_of_a_model_removes_an_argument_that_is_there() -> None:
    entry = {"name": "a", "model": {"path": "m"}, "engine": {"args": {"seed": None}}}
    assert parsed({"args": {"seed": 3}}, models=[entry]).of_model("a").engine.args == {}
    assert fault({"args": {"watermark": 0.1}}, models=[entry]).startswith(
        "models[0].engine.args: seed: null removes nothing"
    )


def test_an_argument_with_a_key_of_the_role_names_that_key() -> None:
    with pytest.raises(ConfigError, match=r"use engine\.max_num_seqs, or max_num_seqs beside these args"):
        parsed({}, decode={"engine": {"args": {"max_num_seqs": 7}}})
    with pytest.raises(ConfigError, match=r"use engine\.block_size$"):
        parsed({}, decode={"engine": {"args": {"block_size": 64}}})


def test_keys_of_roles_are_those_of_the_configuration() -> None:
    assert set(KEYS_OF_ROLES) == set(configuration.RoleEngineConfig.model_fields) & set(REFUSED)


def test_arguments_of_pools_are_checked() -> None:
    pool = {"served_name": "other", "decode": {"engine": {"args": {"seed": 1}}}}
    with pytest.raises(ConfigError, match=r"pools\.p\.decode\.engine\.args: seed: both roles need the same"):
        parsed({}, pools={"p": pool})


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"args": {"max_num_seqs": 7}}, "not accepted here: use engine.max_num_seqs"),
        ({"args": {"max-num-seqs": 7}}, "written as 'max_num_seqs'"),
        ({"args": {"--seed": 7}}, "written as 'seed'"),
        ({"args": {"kv_cache_memory_bytes": "1G"}}, "use engine.kv_cache_gib"),
        ({"args": {"tool_call_parser": "hermes"}}, "vLLM's server, which kvferry does not run: use model.tool_parser"),
        ({"args": {"api-server-count": 2}}, "use gateway.replicas"),
        ({"args": {"spec_method": "ngram"}}, "spec_method: not accepted here: use speculative_config"),
        ({"args": {"x" * 5000: 1}}, "vLLM's engine has no such argument"),
        ({"args": {"a b": 1}}, "vLLM's engine has no such argument"),
        ({"args": {"watermark": None}}, "leave it out"),
        ({"args": {"watermark": float("nan")}}, "a value is"),
        ({"args": {"custom_histogram_buckets": ["x" * 20_000]}}, "is the limit"),
        ({"args": {f"a{i}": 1 for i in range(65)}}, "64 is the limit"),
        ({"args": {"speculative_config": NGRAM}}, "give it in decode.engine.args"),
        ({"env": {"VLLM_LOG_STATS_INTERVAL": 1}}, "quote it, as in engine.env.VLLM_LOG_STATS_INTERVAL='\"1\"'"),
        ({"env": {"LD_PRELOAD": "/x"}}, "begin with VLLM_"),
        ({"env": {"VLLM_HOST_IP": "1.2.3.4"}}, "engine.side_channel_host"),
        ({"env": {"VLLM_X_TOKEN": "1"}}, "secrets"),
        ({"env": {"VLLM_LOGGING_PREFIX": "x" * 5000}}, "4096 characters"),
        ({"env": {f"VLLM_{i}": "" for i in range(65)}}, "64 is the limit"),
        ({"unproven": ["attention_backend"]}, "engine.unproven: no longer a setting (value ['attention_backend'])"),
    ],
)
def test_what_is_not_taken_is_named(engine: dict[str, Any], words: str) -> None:
    assert words in fault(engine)


def test_permissions_of_earlier_states_are_told_what_holds_now() -> None:
    entry = {"name": "a", "model": {"path": "m"}, "engine": {"unproven": ["load_format"]}}
    for said in (fault({"unproven": []}), fault({}, models=[entry])):
        assert "need no permission, and engine.proof decides which pages are transferred" in said


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("eagle", "speculative_config: expected a mapping with method"),
        ({"num_speculative_tokens": 3}, "expected a mapping with method"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens: expected a whole number from 1 to 16"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens: expected a whole number from 1 to 16"),
        ({**MTP, "num_speculative_tokens": 17}, "num_speculative_tokens: expected a whole number from 1 to 16"),
        ({"method": "medusa", "model": "s3://bucket/x"}, "model: expected the draft model's folder or hub id"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "model: expected the draft model's folder or hub id"),
        ({**DRAFTS, "model": ""}, "model: expected"),
        ({**DRAFTS, "model": 5}, "model: expected"),
        ({**DRAFTS, "revision": "v2"}, "revision: of a hub id the newest one is used"),
        ({**DRAFTS, "model": "x" * 4097}, "model: expected"),
        ({**NGRAM, "prompt_lookup_max": None}, "prompt_lookup_max: expected a whole number from 1 to 1024"),
        ({**NGRAM, "prompt_lookup_max": 1025}, "prompt_lookup_max: expected a whole number from 1 to 1024"),
        ({**NGRAM, "prompt_lookup_min": "2"}, "prompt_lookup_min: expected a whole number from 1 to 1024"),
    ],
)
def test_drafts_that_kvferry_could_not_prepare_or_that_take_much_memory_are_refused(value: object, words: str) -> None:
    args = {"args": {"speculative_config": value}}
    assert words in fault(args)
    assert words in fault({}, decode={"engine": args})


def test_ngrams_are_of_the_decode_role_and_no_part_of_the_exchange_digest() -> None:
    args = {"speculative_config": {**NGRAM, "rejection_sample_method": "block"}}
    config = parsed({}, decode={"engine": {"args": args}})
    assert config.engine_of("decode").args == args
    assert config.engine_of("prefill").args == {}
    assert vllm_arguments.equal_values(args, {}) == ""
    with pytest.raises(ConfigError, match=r"prefill\.engine\.args: speculative_config: .*decode\.engine\.args"):
        parsed({}, prefill={"engine": {"args": args}})


@pytest.mark.parametrize(
    ("value", "folder"),
    [
        (DRAFTS, "/models/draft"),
        ({**DRAFTS, "quantization": "fp8"}, "/models/draft"),
        ({"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 3}, "owner/head"),
        ({"method": "medusa", "model": "owner/heads"}, "owner/heads"),
        (MTP, ""),
        ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, ""),
        ({"method": "custom_class", "model": "my_module.Proposer", "num_speculative_tokens": 2}, ""),
        ({"method": "suffix"}, ""),
    ],
)
def test_other_drafts_are_of_both_roles(value: dict[str, Any], folder: str) -> None:
    args = {"speculative_config": value}
    config = parsed({"args": args})
    assert config.engine_of("decode").args == config.engine_of("prefill").args == args
    assert vllm_arguments.draft_model(args) == folder
    assert vllm_arguments.speculates(args)
    assert "speculative_config" in vllm_arguments.equal_values(args, {})
    for role in ("prefill", "decode"):
        with pytest.raises(ConfigError, match=rf"{role}\.engine\.args: speculative_config: both roles need the same"):
            parsed({}, **{role: {"engine": {"args": args}}})
    for own in (NGRAM, None):
        with pytest.raises(ConfigError, match=r"decode\.engine\.args: speculative_config: both roles need the same"):
            parsed({"args": args}, decode={"engine": {"args": {"speculative_config": own}}})


@pytest.mark.parametrize(
    "args",
    [
        {"load_format": "auto"},
        {
            "load_format": "safetensors",
            "model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 4},
        },
        {"load_format": "runai_streamer", "model_loader_extra_config": {"concurrency": 256, "memory_limit": 0}},
        {"model_loader_extra_config": {"num_threads": 1}},
    ],
)
def test_ways_to_read_the_same_weights_are_free(args: dict[str, Any]) -> None:
    config = parsed({"args": {"load_format": "safetensors"}}, decode={"engine": {"args": args}})
    assert config.engine_of("decode").args == {"load_format": "safetensors", **args}
    assert vllm_arguments.equal_values(args, {}) == ""


def test_other_ways_to_load_are_of_both_roles_and_part_of_the_digest() -> None:
    args = {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "x"}}
    assert parsed({"args": args}).engine_of("decode").args == args
    assert all(name in vllm_arguments.equal_values(args, {}) for name in args)
    for of_both, own in (
        ({}, args),
        (args, {"load_format": "auto"}),
        (args, {"model_loader_extra_config": {"pattern": "y"}}),
        ({"load_format": "dummy"}, {"load_format": "dummy"}),
    ):
        assert "both roles need the same: give it in engine.args" in fault(
            {"args": of_both}, decode={"engine": {"args": own}}
        )


@pytest.mark.parametrize("name", ["mamba_block_size", "kv_cache_dtype_skip_layers", "disable_hybrid_kv_cache_manager"])
def test_with_tiers_pages_have_the_layout_that_tiers_are_proven_with(name: str) -> None:
    engine = {"args": {name: 1}}
    assert parsed(engine).engine.args == {name: 1}
    assert fault(engine, tier={"enabled": True}).startswith(f"engine.args.{name}: refused with tier.enabled")
    entry = {"name": "a", "model": {"path": "m"}, "engine": engine, "tier": {"enabled": True}}
    assert fault({}, models=[entry]).startswith(f"models[0].engine.args.{name}: refused with tier.enabled")
    assert parsed({}, models=[{**entry, "tier": {}}])


def test_equal_values_are_those_that_may_change_pages() -> None:
    args = {"watermark": 0.1, "seed": 3, "attention_backend": "X"}
    env = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_USE_SOMETHING": "1"}
    assert parsed({"args": args, "env": env}).engine.env == env
    assert vllm_arguments.equal_values(args, env) == '{"VLLM_USE_SOMETHING":"1","attention_backend":"X","seed":3}'
    assert vllm_arguments.equal_values({"watermark": 0.1}, {"VLLM_LOGGING_LEVEL": "INFO"}) == ""


def test_every_rule_has_a_reason() -> None:
    assert all([*REFUSED.values(), *FREE.values(), *REFUSED_WITH_TIERS.values()])
    assert not set(REFUSED) & set(FREE)
    assert not REFUSED_WITH_TIERS.keys() & {*REFUSED, *FREE}
