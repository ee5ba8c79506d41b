"""argument_values.py: what an engine would end its start for is refused when a configuration is read."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry import config as configuration
from kvferry.errors import ConfigError

DRAFTS = {"speculative_config": {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3}}


def parsed(engine: dict[str, Any], **sections: Any) -> configuration.ClusterConfig:
    return configuration.parse({"engine": engine, **sections})


def fault(engine: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(engine, **sections)
    assert len(caught.value.message) < 500
    return caught.value.message


@pytest.mark.parametrize(
    ("engine", "sections", "said"),
    [
        (
            {"max_num_batched_tokens": 512, "args": {"max_num_scheduled_tokens": 513}},
            {},
            "engine.args.max_num_scheduled_tokens: expected at most engine.max_num_batched_tokens (512), not 513",
        ),
        (
            {"args": {"max_num_scheduled_tokens": "1K"}},
            {"decode": {"engine": {"max_num_batched_tokens": 1023}}},
            "engine.args.max_num_scheduled_tokens: expected at most decode.engine.max_num_batched_tokens (1023), not "
            "1024",
        ),
        (
            {"max_num_batched_tokens": 64},
            {"prefill": {"engine": {"max_num_seqs": 65}}},
            "prefill.engine.max_num_seqs: expected at most engine.max_num_batched_tokens (64), not 65",
        ),
        (
            {"tensor_parallel_size": 2, "args": {"numa_bind_nodes": [0]}},
            {},
            "engine.args.numa_bind_nodes: expected a node for each of 2 ranks, not 1",
        ),
        (
            {"args": {"long_prefill_token_threshold": 4097}},
            {"model": {"max_model_len": 4096}},
            "engine.args.long_prefill_token_threshold: expected at most model.max_model_len (4096), not 4097",
        ),
    ],
)
def test_arguments_that_do_not_fit_the_engines_settings_are_refused(
    engine: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    assert fault(engine, **sections).startswith(said)


@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        ({"args": DRAFTS}, {}),
        ({"tensor_parallel_size": 2, "args": DRAFTS}, {}),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 64, "args": {"max_num_scheduled_tokens": 64}}, {}),
        ({"tensor_parallel_size": 2, "args": {"numa_bind_nodes": [0, 1]}}, {}),
        ({"args": {"long_prefill_token_threshold": 4096}}, {"model": {"max_model_len": 4096}}),
        # vLLM's own number depends on the device: compared when an engine starts.
        ({"args": {"max_num_scheduled_tokens": 1 << 20}}, {}),
    ],
)
def test_arguments_at_the_limits_of_the_settings_are_taken(engine: dict[str, Any], sections: dict[str, Any]) -> None:
    assert parsed(engine, **sections).engine_of("decode").args == engine.get("args", {})


def test_a_model_of_its_own_has_arguments_that_fit_its_settings() -> None:
    entry = {"name": "a", "model": {"path": "m"}, "engine": {"tensor_parallel_size": 2}}
    other = {**entry, "name": "b", "engine": {"tensor_parallel_size": 1}}
    assert fault({"args": {"numa_bind_nodes": [0]}}, models=[other, entry]).startswith(
        "models[1]: engine.args.numa_bind_nodes: expected a node for each of 2 ranks"
    )
    few = {**entry, "engine": {"args": {"max_num_scheduled_tokens": 200}}}
    few["decode"] = {"engine": {"max_num_batched_tokens": 100}}
    assert fault({}, models=[few]) == (
        "models[0].engine.args.max_num_scheduled_tokens: expected at most "
        "models[0].decode.engine.max_num_batched_tokens (100), not 200"
    )
    long = {**entry, "model": {"path": "m", "max_model_len": 512}}
    assert fault({"args": {"long_prefill_token_threshold": 600}}, models=[long]) == (
        "models[0]: engine.args.long_prefill_token_threshold: expected at most models[0].model.max_model_len (512), "
        "not 600"
    )
    # The default model's own fault first.
    ranks = {"args": {"numa_bind_nodes": [0]}, "tensor_parallel_size": 2}
    assert fault(ranks, models=[entry]).startswith("engine.args.numa_bind_nodes:")
