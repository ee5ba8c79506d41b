"""argument_values.py: which values of `engine.args` are refused when a configuration is read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import config as configuration
from kvferry.arguments.argument_values import EXPECTED, why_not_expected
from kvferry.errors import ConfigError
from support.engine_arguments import VALUES

NAN, INF = float("nan"), float("inf")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# Of no argument that is a number or a list of numbers.
HOSTILE = [
    "", " ", "--seed", "nan", "inf", "1e99999", "9" * 5000, "x\0", "-5", -5, -0.5, NAN, INF, -INF, 10**30, -(10**30),
    2**63, [], {}, [[]], [{}], {"": []}, {"x": 1}, [None], [""], ["a"], [-1], [NAN], nested(17), nested(900),
    True, 5.5, ["0-3"] * 65, [0] * 65,
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_no_argument_may_be_is_refused_with_the_key_and_what_is_expected(name: str) -> None:
    for value in HOSTILE:
        with pytest.raises(ConfigError) as caught:
            configuration.parse({"model": {"path": "m"}, "engine": {"device": "gpu", "args": {name: value}}})
        assert f"engine.args: {name}: " in caught.value.message
        assert len(caught.value.message) < 500
    assert why_not_expected(name, VALUES[name]) == ""


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_gpu_blocks_override", 0, "expected a whole number from 2 to 2147483647, not 0"),
        ("num_gpu_blocks_override", 1, "from 2"),
        ("num_gpu_blocks_override", 2**31, "from 2"),
        ("num_gpu_blocks_override", True, "not True"),
        ("num_gpu_blocks_override", 5.0, "not 5.0"),
        ("num_gpu_blocks_override", "4G", "from 2"),
        ("kv_cache_memory_bytes", 0, "or as in 4G"),
        ("kv_cache_memory_bytes", "1025T", "to 1125899906842624"),
        ("kv_cache_memory_bytes", "4 G", "or as in 4G"),
        ("kv_cache_memory_bytes", "4.5G", "or as in 4G or 4.5g"),
        ("safetensors_prefetch_block_size", "4.5K", "or as in 4G or 4.5g"),
        ("seed", -1, "from 0 to 4294967295"),
        ("seed", 2**32, "from 0 to 4294967295"),
        ("max_num_scheduled_tokens", 0, "from 1"),
        ("long_prefill_token_threshold", -1, "from 0"),
        ("safetensors_prefetch_num_threads", 257, "from 1 to 256"),
        ("safetensors_prefetch_block_size", "2G", "from 4096 to 1073741824"),
        ("distributed_timeout_seconds", 0, "from 1"),
        ("cpu_distributed_timeout_seconds", 10**12, "from 1"),
        ("numa_bind_nodes", [1024], "from 0 to 1023"),
        ("numa_bind_nodes", 0, "expected a list of 1 to 64, each a whole number from 0 to 1023"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(name: str, value: object, words: str) -> None:
    reason = why_not_expected(name, value)
    assert words in reason
    assert len(reason) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_gpu_blocks_override", 2),
        ("num_gpu_blocks_override", 2**31 - 1),
        ("num_gpu_blocks_override", "4096"),
        ("kv_cache_memory_bytes", 2**50),
        ("kv_cache_memory_bytes", "25.6g"),
        ("seed", 0),
        ("numa_bind_nodes", [1023] * 64),
    ],
)
def test_values_at_the_limits_are_taken(name: str, value: object) -> None:
    assert why_not_expected(name, value) == ""


@given(
    st.sampled_from([*sorted(EXPECTED), "compilation_config"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    ),
)
def test_any_value_is_taken_or_refused_in_a_short_sentence(name: str, value: object) -> None:
    assert len(why_not_expected(name, value)) < 300


@pytest.mark.parametrize("value", ["", [], 10**30, -(2**63), "x\0", [["\0"]], {"a": {"\0": 1}}, nested(17)])
def test_other_arguments_are_refused_what_no_argument_can_be(value: object) -> None:
    assert why_not_expected("compilation_config", value) != ""
    assert why_not_expected("compilation_config", nested(16)) == ""


def test_the_key_of_an_argument_is_that_of_its_role_and_pool() -> None:
    config = configuration.parse(
        {
            "model": {"path": "m"},
            "engine": {"args": {"seed": 1, "watermark": 0.1}},
            "decode": {"engine": {"args": {"watermark": 0.2}}},
            "pools": {"p": {"served_name": "q", "decode": {"engine": {"args": {"kv_cache_metrics": True}}}}},
        }
    )
    assert config.argument_keys("prefill") == {"seed": "engine.args.seed", "watermark": "engine.args.watermark"}
    assert config.argument_keys("decode")["watermark"] == "decode.engine.args.watermark"
    assert config.argument_keys("decode", "p")["kv_cache_metrics"] == "pools.p.decode.engine.args.kv_cache_metrics"
    assert config.argument_keys("decode", "p")["watermark"] == "engine.args.watermark"


def test_the_key_of_an_entrys_argument_is_where_it_stands() -> None:
    entry = {
        "name": "chat",
        "engine": {"args": {"seed": 3, "load_format": "safetensors", "use_tqdm_on_load": None}},
        "decode": {"engine": {"args": {"load_format": "auto"}}},
    }
    args = {"seed": 1, "watermark": 0.1, "use_tqdm_on_load": False}
    config = configuration.parse({"engine": {"args": args}, "models": [{"name": "small"}, entry]})
    assert config.argument_keys("decode", "chat") == {
        "seed": "models[chat].engine.args.seed",
        "watermark": "engine.args.watermark",
        "load_format": "models[chat].decode.engine.args.load_format",
    }
    assert config.argument_keys("prefill", "chat")["load_format"] == "models[chat].engine.args.load_format"
    assert set(config.argument_keys("decode", "chat")) == set(config.of_model("chat").engine_of("decode", "chat").args)
