"""vllm_arguments.py and `engine.args`, `engine.env`, `engine.unproven` of the configuration."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import config as configuration
from kvferry.arguments import vllm_arguments
from kvferry.arguments.vllm_arguments import KEYS_OF_ROLES, REFUSED, RULES, Rule
from kvferry.errors import ConfigError
from support.engine_arguments import VALUES

BY_RULE = {rule: [name for name, of_name in RULES.items() if of_name is rule] for rule in Rule}


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def parsed(engine: dict[str, Any], **sections: Any) -> configuration.ClusterConfig:
    return configuration.parse({"model": {"path": "m"}, "engine": engine, **sections})


@given(st.sampled_from(sorted(RULES)), st.booleans(), st.booleans())
def test_every_argument_is_taken_or_refused_by_its_rule(name: str, of_role: bool, permitted: bool) -> None:
    values_of = {"speculative_config": {"method": "medusa", "num_speculative_tokens": 1}, **VALUES}
    args = {name: values_of.get(name, 1)}
    engine: dict[str, Any] = {"device": "gpu"}
    if permitted and RULES[name] is Rule.UNPROVEN:
        engine["unproven"] = [name]
    sections = {"decode": {"engine": {"args": args}}} if of_role else {}
    rule = RULES[name]
    taken = rule is Rule.FREE or (not of_role and (rule is Rule.EQUAL or (rule is Rule.UNPROVEN and permitted)))
    values = engine if of_role else {**engine, "args": args}
    if taken:
        assert parsed(values, **sections).engine_of("decode").args == args
        return
    with pytest.raises(ConfigError) as caught:
        parsed(values, **sections)
    assert name in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_roles_arguments_replace_those_of_both() -> None:
    config = parsed({"args": {"watermark": 0.02, "seed": 3}}, prefill={"engine": {"args": {"watermark": 0.05}}})
    assert config.engine_of("prefill").args == {"watermark": 0.05, "seed": 3}
    assert config.engine_of("decode").args == {"watermark": 0.02, "seed": 3}


def test_null_removes_an_argument_from_a_role() -> None:
    args = {"watermark": 0.02, "load_format": "safetensors", "seed": 3}
    removed = {"watermark": None, "load_format": None, "kv_cache_metrics": None}
    config = parsed({"args": args}, decode={"engine": {"args": removed}})
    assert config.engine_of("decode").args == {"seed": 3}
    assert config.engine_of("prefill").args == args
    assert config.argument_keys("decode") == {"seed": "engine.args.seed"}
    assert configuration.parse(config.model_dump(mode="json")) == config, "workers read it again"


@pytest.mark.parametrize(
    ("args", "name", "words"),
    [
        ({}, "watermrk", "watermrk: vLLM's engine has no such argument; did you mean 'watermark'?"),
        ({}, "max_num_seqs", "max_num_seqs: not accepted here: use engine.max_num_seqs"),
        ({"seed": 3}, "seed", "seed: both roles need the same: remove it in engine.args"),
        ({"speculative_config": None}, "speculative_config", "engine.args: speculative_config: it has no value"),
    ],
)
def test_null_is_refused_where_it_removes_nothing_that_a_role_may_choose(
    args: dict[str, Any], name: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({"args": args}, decode={"engine": {"args": {name: None}}})
    assert words in caught.value.message


def test_an_argument_with_a_key_of_the_role_names_that_key() -> None:
    with pytest.raises(ConfigError, match=r"use engine\.max_num_seqs, or max_num_seqs beside these args"):
        parsed({}, decode={"engine": {"args": {"max_num_seqs": 7}}})
    with pytest.raises(ConfigError, match=r"use engine\.block_size$"):
        parsed({}, decode={"engine": {"args": {"block_size": 64}}})


def test_keys_of_roles_are_those_of_the_configuration() -> None:
    assert set(KEYS_OF_ROLES) == set(configuration.RoleEngineConfig.model_fields) & set(REFUSED)


def test_a_wrong_name_in_a_list_is_said_once() -> None:
    with pytest.raises(ConfigError, match=r"engine\.unproven: 'nonsense': vLLM's engine has no such argument$"):
        parsed({"unproven": ["nonsense"]})


def test_arguments_of_processes_of_vllm_are_not_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({"args": {"api_process_counts": 2}})
    assert "_api_process" not in caught.value.message.replace("api_process_counts", "")


def test_arguments_of_pools_are_checked() -> None:
    pool = {"served_name": "other", "decode": {"engine": {"args": {"seed": 1}}}}
    with pytest.raises(ConfigError, match=r"pools\.p\.decode\.engine\.args: seed: both roles need the same"):
        parsed({}, pools={"p": pool})


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"args": {"max_num_seqs": 7}}, "not accepted here: use engine.max_num_seqs"),
        ({"args": {"max-num-seqs": 7}}, "written as 'max_num_seqs'"),
        ({"args": {"watermrk": 1}}, "did you mean 'watermark'"),
        ({"args": {"kv_cache_memory_bytes": "1G"}}, "use engine.kv_cache_gib"),
        ({"args": {"tool_call_parser": "hermes"}}, "vLLM's server, which kvferry does not run: use model.tool_parser"),
        ({"args": {"api-server-count": 2}}, "use gateway.replicas"),
        ({"args": {"x" * 5000: 1}}, "vLLM's engine has no such argument"),
        ({"args": {"watermark": None}}, "leave it out"),
        ({"args": {"watermark": float("nan")}}, "a value is"),
        ({"args": {"custom_histogram_buckets": ["x" * 20_000]}}, "is the limit"),
        ({"args": {f"a{i}": 1 for i in range(65)}}, "64 is the limit"),
        ({"args": {"speculative_config": NGRAM}}, "give it in decode.engine.args"),
        ({"args": {"speculative_config": {"method": "medusa"}}}, "add 'speculative_config' to engine.unproven"),
        ({"unproven": ["seed"]}, "it needs no permission"),
        ({"unproven": ["block_size"]}, "not accepted here: use engine.block_size"),
        ({"unproven": ["nonsense"]}, "vLLM's engine has no such argument"),
        ({"env": {"VLLM_LOG_STATS_INTERVAL": 1}}, "quote it, as in engine.env.VLLM_LOG_STATS_INTERVAL='\"1\"'"),
        ({"env": {"LD_PRELOAD": "/x"}}, "begin with VLLM_"),
        ({"env": {"VLLM_HOST_IP": "1.2.3.4"}}, "engine.side_channel_host"),
        ({"env": {"VLLM_USE_SOMETHING": "1"}}, "add its name to engine.unproven"),
        ({"env": {"VLLM_X_TOKEN": "1"}, "unproven": ["VLLM_X_TOKEN"]}, "secrets"),
        ({"env": {"VLLM_LOGGING_PREFIX": "x" * 5000}}, "4096 characters"),
        ({"env": {f"VLLM_{i}": "" for i in range(65)}}, "64 is the limit"),
    ],
)
def test_what_is_not_taken_is_named(engine: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(engine)
    assert words in caught.value.message
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "suffix"}, "tested methods of speculative decoding: ngram, draft_model, eagle, eagle3"),
        ({"model": "x" * 500}, "'model' is untested"),
        ({"quantization": "fp8"}, "'quantization' is untested"),
        ({"num_speculative_tokens": 17}, "from 1 to 16"),
        ({"prompt_lookup_max": 1025}, "prompt_lookup_max: expected a whole number from 1 to 1024"),
    ],
)
def test_only_ngrams_need_no_permission_to_speculate(change: dict[str, Any], words: str) -> None:
    values = {**NGRAM, **change}
    decode = {"engine": {"args": {"speculative_config": values}}}
    with pytest.raises(ConfigError) as caught:
        parsed({}, decode=decode)
    assert "decode.engine.args: speculative_config: " in caught.value.message
    assert words in caught.value.message
    assert len(caught.value.message) < 1000
    # At the operator's own risk, in both roles alike: a draft model has pages of its own.
    permitted = {"unproven": ["speculative_config"], "args": {"speculative_config": values}}
    assert "speculative_config" in vllm_arguments.equal_values(parsed(permitted).engine.args, {})


@pytest.mark.parametrize("permitted", [False, True])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("eagle", "speculative_config: expected a mapping with method (ngram, draft_model, eagle, eagle3) and num"),
        ({"num_speculative_tokens": 3}, "method: expected one of ngram, draft_model, eagle, eagle3; the mapping"),
        ({**NGRAM, "method": "eagel"}, "method: vLLM has no 'eagel'; did you mean 'eagle'?"),
        ({**NGRAM, "method": "EAGLE3"}, "did you mean 'eagle3'?"),
        ({**NGRAM, "method": "q" * 500}, "expected one of ngram, draft_model"),
        ({**NGRAM, "method": "mtp"}, "method: models that draft by MTP are not served (docs/user/models.md)"),
        ({**NGRAM, "method": "qwen3_next_mtp"}, "method: models that draft by MTP are not served"),
        ({"method": "eagle", "modle": "x", "num_speculative_tokens": 3}, "'modle': vLLM has no such key here; did you"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens: expected a whole number from 1 to 16"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens: expected a whole number from 1 to 16"),
        ({"method": "ngram"}, "num_speculative_tokens: expected a whole number from 1 to 16"),
        ({"method": "medusa", "num_speculative_tokens": -1}, "num_speculative_tokens: expected a whole number"),
        ({"method": "medusa", "model": "s3://bucket/x"}, "model: expected the draft model's folder or hub id"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "model: expected the EAGLE head's folder or hub id"),
        ({**NGRAM, "prompt_lookup_max": None}, "prompt_lookup_min, prompt_lookup_max: expected whole numbers"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min, prompt_lookup_max: expected whole numbers"),
        ({**NGRAM, "prompt_lookup_min": "2"}, "prompt_lookup_min, prompt_lookup_max: expected whole numbers"),
        ({**NGRAM, "prompt_lookup_min": 5}, "prompt_lookup_min: expected at most prompt_lookup_max"),
    ],
)
def test_mistakes_in_speculative_config_are_refused_whatever_is_permitted(
    value: object, words: str, permitted: bool
) -> None:
    unproven = ["speculative_config"] if permitted else []
    for engine, of_role in (
        ({"args": {"speculative_config": value}}, {}),
        ({}, {"decode": {"engine": {"args": {"speculative_config": value}}}}),
    ):
        with pytest.raises(ConfigError) as caught:
            parsed({"unproven": unproven, **engine}, **of_role)
        assert words in caught.value.message
        assert "engine.unproven" not in caught.value.message
        assert len(caught.value.message) < 600


def test_ngrams_are_of_the_decode_role_and_no_part_of_the_exchange_digest() -> None:
    args = {"speculative_config": NGRAM}
    config = parsed({}, decode={"engine": {"args": args}})
    assert config.engine_of("decode").args == args
    assert config.engine_of("prefill").args == {}
    assert vllm_arguments.equal_values(args, {}) == ""
    with pytest.raises(ConfigError, match=r"prefill\.engine\.args: speculative_config: .*decode\.engine\.args"):
        parsed({}, prefill={"engine": {"args": args}})


DRAFTS = {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3}


def test_a_draft_model_is_of_both_roles() -> None:
    args = {"speculative_config": DRAFTS}
    config = parsed({"args": args})
    assert config.engine_of("decode").args == config.engine_of("prefill").args == args
    assert vllm_arguments.draft_model(args) == "/models/draft"
    for role in ("prefill", "decode"):
        with pytest.raises(ConfigError, match=rf"{role}\.engine\.args: speculative_config: both roles need the same"):
            parsed({}, **{role: {"engine": {"args": args}}})
    with pytest.raises(ConfigError, match=r"decode\.engine\.args: speculative_config: engine\.args has a draft model"):
        parsed({"args": args}, decode={"engine": {"args": {"speculative_config": NGRAM}}})
    with pytest.raises(
        ConfigError, match=r"decode\.engine\.args: speculative_config: both roles need the same: remove"
    ):
        parsed({"args": args}, decode={"engine": {"args": {"speculative_config": None}}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": ""}, "model: expected the draft model's folder"),
        ({"model": 5}, "model: expected"),
        ({"model": "x" * 4097}, "model: expected"),
        ({"model": "s3://bucket/draft"}, "model: expected the draft model's folder"),
        ({"num_speculative_tokens": 17}, "from 1 to 16"),
        ({"draft_sample_method": "probabilistic"}, "'draft_sample_method' is untested"),
        ({"quantization": "fp8"}, "'quantization' is untested"),
    ],
)
def test_draft_models_are_accepted_with_tested_settings(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({"args": {"speculative_config": {**DRAFTS, **change}}})
    assert words in caught.value.message
    assert len(caught.value.message) < 1000
    assert vllm_arguments.draft_model({"speculative_config": {**DRAFTS, **change}}) == ""


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


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"load_format": "dummy"}, "dummy: weights are random"),
        ({"load_format": "fastsafetensors"}, "of a GPU alone"),
        ({"load_format": "x" * 5000}, "auto, safetensors, runai_streamer, which are tested"),
        ({"load_format": ["auto"]}, "are tested"),
        ({"model_loader_extra_config": "x"}, "expected a mapping"),
        ({"model_loader_extra_config": {"distributed": True}}, "tested keys are enable_multithread_load, num_threads"),
        ({"model_loader_extra_config": {"enable_multithread_load": 1}}, "expected true or false"),
        ({"model_loader_extra_config": {"num_threads": True}}, "num_threads: expected a whole number from 1 to 256"),
        ({"model_loader_extra_config": {"num_threads": 257}}, "from 1 to 256"),
    ],
)
def test_other_ways_to_load_need_permission_and_are_part_of_the_digest(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({"args": args})
    (name,) = args
    assert words in caught.value.message
    assert f"add '{name}' to engine.unproven" in caught.value.message
    assert len(caught.value.message) < 1000
    assert name in vllm_arguments.equal_values(parsed({"unproven": [name], "args": args}).engine.args, {})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_token": 3}},
            "'num_speculative_token': vLLM has no such key here; did you mean 'num_speculative_tokens'?",
        ),
        (
            {"speculative_config": {**DRAFTS, "modell": "/m"}},
            "'modell': vLLM has no such key here; did you mean 'model'",
        ),
        ({"speculative_config": {"method": "eagle", "draft_model": "/m"}}, "did you mean 'draft_model_config'?"),
        (
            {"speculative_config": {**NGRAM, "x" * 5000: 1}},
            "there are method, num_speculative_tokens, prompt_lookup_max",
        ),
        ({"speculative_config": {**NGRAM, "method": "n-gram"}}, "vLLM has no 'n-gram'; did you mean 'ngram'?"),
        ({"speculative_config": {**DRAFTS, "method": "draft-model"}}, "did you mean 'draft_model'?"),
        (
            {"model_loader_extra_config": {"num_thread": 3}},
            "'num_thread': vLLM has no such key here; did you mean 'num_th",
        ),
        ({"model_loader_extra_config": {3: 3}}, "'3': vLLM has no such key here; there are enable_multithread_load, "),
    ],
)
def test_misspelt_keys_are_told_the_nearest_one_and_no_permission(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({"args": args})
    assert words in caught.value.message
    assert "engine.unproven" not in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("of_both", "of_decode", "words"),
    [
        (
            {},
            {"model_loader_extra_config": {"concurrency": 2}},
            "decode.engine.args.model_loader_extra_config.concurrency: only with load_format runai_streamer",
        ),
        (
            {"load_format": "runai_streamer"},
            {"model_loader_extra_config": {"num_threads": 2}},
            "num_threads: only with load_format auto or safetensors, and it is runai_streamer",
        ),
        (
            {"model_loader_extra_config": {"memory_limit": 1}},
            {},
            " engine.args.model_loader_extra_config.memory_limit: only with load_format runai_streamer, and it is auto",
        ),
    ],
)
def test_an_option_of_another_load_format_is_refused(
    of_both: dict[str, Any], of_decode: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({"args": of_both}, decode={"engine": {"args": of_decode}})
    assert words in f" {caught.value.message}"


def test_a_limit_of_memory_has_limits() -> None:
    for limit, is_taken in ((-1, False), (0, True), (1 << 50, True), ((1 << 50) + 1, False), (1.0, False)):
        reason = vllm_arguments.why_no_loader_options({"memory_limit": limit})
        assert ("memory_limit: expected a whole number from 0" in reason) is not is_taken


@pytest.mark.parametrize("name", ["enable_sleep_mode", "sleep_preserve_parameter_names", "weight_transfer_config"])
def test_memory_and_weights_that_go_away_cannot_be_permitted(name: str) -> None:
    for engine in ({"args": {name: True}}, {"unproven": [name]}):
        with pytest.raises(ConfigError, match=f"{name}'?: not accepted here: "):
            parsed(engine)


def test_equal_values_are_those_that_may_change_pages() -> None:
    args = {"watermark": 0.1, "seed": 3, "attention_backend": "X"}
    env = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_USE_SOMETHING": "1"}
    assert vllm_arguments.equal_values(args, env) == '{"VLLM_USE_SOMETHING":"1","attention_backend":"X","seed":3}'
    assert vllm_arguments.equal_values({"watermark": 0.1}, {"VLLM_LOGGING_LEVEL": "INFO"}) == ""


def test_every_rule_has_arguments_with_a_reason() -> None:
    assert all(BY_RULE.values())
    assert all(vllm_arguments.REASONS[name] for name in RULES)
