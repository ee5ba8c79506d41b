"""`engine.args` against vLLM: names are its own, and values reach its configuration with its own types."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, get_args

import pytest

from kvferry import config as configuration
from kvferry import model_folder
from kvferry.arguments import vllm_arguments
from kvferry.arguments.argument_values import EXPECTED, Whole, whole
from kvferry.arguments.vllm_arguments import FREE, FREE_VARIABLES, OF_ROLES, REFUSED, REFUSED_WITH_TIERS
from kvferry.config import EngineConfig, ModelConfig
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.errors import ConfigError, UnsupportedEngine
from kvferry.pages.exchange import ARGUMENTS
from support.engine_arguments import VALUES
from support.vllm_configs import vllm_config_of

pytestmark = pytest.mark.vllm

TEN = {
    "seed": 7,
    "watermark": 0.03,
    "num_gpu_blocks_override": 123,
    "cpu_distributed_timeout_seconds": 55,
    "long_prefill_token_threshold": 96,
    "max_num_scheduled_tokens": 200,
    "safetensors_load_strategy": "eager",
    "distributed_timeout_seconds": 77,
    "use_tqdm_on_load": False,
    "kv_cache_metrics": True,
}


def config_of(engine: EngineConfig) -> Any:
    return vllm_config_of(model_folder.resolve("default"), engine=engine)


def test_arguments_that_are_named_are_vllms() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {*REFUSED, *OF_ROLES, *REFUSED_WITH_TIERS, *EXPECTED} <= names
    assert set(FREE) | {"seed"} == set(VALUES)


def test_arguments_of_vllms_server_are_none_of_its_engine() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    names = set(vllm_arguments._KEYS_OF_THE_SERVER)
    assert names <= {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions}
    assert not names & {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_methods_of_drafts_are_vllms() -> None:
    from vllm.config.speculative import SpeculativeMethod

    methods = set(get_args(SpeculativeMethod))
    known = {*vllm_arguments.DRAFT_METHODS, *vllm_arguments._METHODS_WITHOUT_MODEL}
    assert known <= methods
    # Those with a model that may be a folder of its own: kvferry fetches it where one is named.
    assert {each for each in methods - known if not each.endswith("mtp")} == {
        "medusa",
        "mlp_speculator",
        "dflash",
        "dspark",
    }


def test_every_free_argument_is_one_of_vllms_command_line() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = {action.dest for action in AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._actions}
    assert set(OF_ROLES) <= known


def test_ten_arguments_reach_the_engines_configuration() -> None:
    from kvferry.engine.vllm.plugins.exchange_fields import exchange_fields

    plain, given = config_of(EngineConfig()), config_of(EngineConfig(args=TEN))
    assert given.model_config.seed == 7 != plain.model_config.seed
    assert given.cache_config.num_gpu_blocks_override == 123
    assert given.parallel_config.cpu_distributed_timeout_seconds == 55
    assert given.scheduler_config.watermark == 0.03
    assert given.scheduler_config.long_prefill_token_threshold == 96
    assert given.scheduler_config.max_num_scheduled_tokens == 200
    assert given.load_config.safetensors_load_strategy == "eager"
    assert given.load_config.use_tqdm_on_load is False
    assert given.parallel_config.distributed_timeout_seconds == 77
    assert given.observability_config.kv_cache_metrics is True
    # Only what pages may depend on counts for their exchange.
    assert dict(exchange_fields(given, weights="w"))[ARGUMENTS] == '{"seed":7}'
    assert ARGUMENTS not in dict(exchange_fields(plain, weights="w"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"watermark": "much"}, "engine.args.watermark: vLLM refuses it"),
        ({"seed": [1, 2]}, "engine.args.seed: vLLM refuses it"),
        ({"safetensors_load_strategy": "--seed"}, "engine.args.safetensors_load_strategy: vLLM refuses it"),
        ({"watermark": 1}, "engine.args.watermark: vLLM refuses it"),
        ({"kv_cache_metrics": "yes"}, "engine.args.kv_cache_metrics: vLLM refuses it"),
        ({"kv_cache_metrics": 1}, "engine.args.kv_cache_metrics: vLLM refuses it"),
        ({"kv_cache_metrics_sample": 0}, "engine.args.kv_cache_metrics_sample: vLLM refuses it"),
        ({"jit_monitor_mode": "loud"}, "engine.args.jit_monitor_mode: vLLM refuses it"),
        ({"numa_bind_cpus": ["0;1"]}, "engine.args.numa_bind_cpus: vLLM refuses it"),
        ({"custom_histogram_buckets": {"request_latency": [2, 1]}}, "engine.args.custom_histogram_buckets: vLLM ref"),
        ({"watermrk": 0.1}, "engine.args.watermrk: vLLM's engine has no such argument; did you mean watermark?"),
        ({"x" * 80: 0.1}, "vLLM's engine has no such argument"),
        ({"load_format": "nonsense"}, "engine.args.load_format: vLLM refuses it"),
        ({"model_loader_extra_config": {"num_thread": 3}}, "engine.args.model_loader_extra_config: vLLM refuses it"),
        ({"model_loader_extra_config": {"concurrency": 3}}, "engine.args.model_loader_extra_config: vLLM refuses it"),
        (
            {"load_format": "runai_streamer", "model_loader_extra_config": {"memory_limit": True}},
            "memory_limit must be an integer",
        ),
    ],
)
def test_a_value_that_vllm_refuses_is_named_with_its_reason(args: dict[str, Any], words: str) -> None:
    from kvferry.engine.vllm.start.argument_parser import parsed

    with pytest.raises(ConfigError) as caught:
        parsed(args, {})
    assert words in caught.value.message
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("chosen", ["auto", "safetensors", "runai_streamer", "dummy", "sharded_state"])
def test_load_formats_are_vllms(chosen: str) -> None:
    from kvferry.engine.vllm.start.argument_parser import parsed

    assert parsed({"load_format": chosen}, {})["load_format"] == chosen


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_vllm_takes_what_is_expected_of_an_argument(name: str) -> None:
    from kvferry.engine.vllm.start.argument_parser import parsed

    expected, values = EXPECTED[name], [VALUES[name]]
    if isinstance(expected, Whole):
        values += [expected.low, expected.high]
    for value in values:
        assert name in parsed({name: value}, {})


@pytest.mark.parametrize("text", ["4.5G", "4.5g", "4G", "25.6k", "1.0T", "12", "4 G", "4.G", ".5g", "1e3", "-1k"])
def test_numbers_with_suffixes_are_those_that_vllm_reads(text: str) -> None:
    import argparse

    from vllm.utils.argparse_utils import human_readable_int

    try:
        number = human_readable_int(text)
    except (ValueError, argparse.ArgumentTypeError):
        number = None
    assert whole(text) == number


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream_interval", 0),
        ("offload_num_in_group", 0),
        ("cpu_offload_gb", -1),
        ("max_num_active_seqs", 0),
        ("decode_context_parallel_size", 0),
        ("numa_bind_cpus", ["9-1"]),
        ("custom_histogram_buckets", {"nonsense": [1]}),
        ("show_hidden_metrics_for_version", "x"),
        ("compilation_config", {"x": 1}),
        ("profiler_config", {"profiler": "\u00df" * 5000}),
    ],
)
def test_a_value_that_vllms_classes_refuse_is_named_by_the_key_it_was_given_by(name: str, value: Any) -> None:
    """Its parser takes it, and its configuration would end the engine's start without a key."""
    from kvferry.engine.vllm.start.argument_parser import parsed

    with pytest.raises(ConfigError) as caught:
        parsed({"seed": 1, name: value}, {"seed": "engine.args.seed", name: f"decode.engine.args.{name}"})
    assert caught.value.message.startswith(f"decode.engine.args.{name}: vLLM refuses it: ")
    assert "pydantic.dev" not in caught.value.message
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    "args",
    [
        {"speculative_config": {"method": "nonsense", "num_speculative_tokens": 1}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": -1}},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 1}},
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "modle": "x"}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": "x"}},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 1,
                "prompt_lookup_min": 5,
                "prompt_lookup_max": 4,
            }
        },
        {"speculative_config": {"x" * 5000: 1}},
        {"long_prefill_token_threshold": 10**6},
        {"numa_bind_nodes": [0]},
        {"quantization": "nonsense"},
        {"attention_backend": "NONSENSE"},
        {"config_format": "nonsense"},
    ],
)
def test_what_the_whole_configuration_refuses_names_the_argument(args: dict[str, Any]) -> None:
    from kvferry.engine.vllm.start.argument_parser import refusal

    (name,) = args
    args = {"watermark": 0.1, **args}
    with pytest.raises(Exception) as caught:
        config_of(EngineConfig().model_copy(update={"args": args}))  # without kvferry's own checks
    message = refusal(caught.value, args, {})
    assert message.startswith(f"engine.args.{name}: vLLM refuses it: ")
    assert "watermark" not in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("no kernel for this model and seed, quantization or dtype", []),
        ("the quantization of the checkpoint is gptq", []),
        ("EngineArgs(seed=0, quantization=None, watermark=0.0)", []),
        ("EngineArgs(seed=3, quantization='awq')", ["seed", "quantization"]),
        ("Unknown quantization method: awq", ["quantization"]),
        ("argument --quantization: expected one argument", ["quantization"]),
        ("unexpected 'seed'", ["seed"]),
        ("`watermark` was given", ["watermark"]),
        ("num_gpu_blocks_override is too small", ["num_gpu_blocks_override"]),
        ("num_gpu_blocks_override=None is too small", []),
        ("model_quantization and seeds", []),
    ],
)
def test_only_arguments_that_an_error_is_about_are_named(text: str, named: list[str]) -> None:
    from kvferry.engine.vllm.start.argument_parser import refusal

    args = {"seed": 3, "quantization": "awq", "watermark": 0.1, "num_gpu_blocks_override": 5}
    message = refusal(ValueError(text), args, {})
    if named:
        keys = ", ".join(f"engine.args.{name}" for name in args if name in named)
        assert message == f"{keys}: vLLM refuses it: {text}"
    else:
        everything = ", ".join(f"engine.args.{name}" for name in args)
        assert message == f"vLLM refuses this configuration: {text} (given to it: {everything})"


def test_the_field_that_pydantic_names_is_named_alone() -> None:
    from pydantic import BaseModel, Field, ValidationError

    from kvferry.engine.vllm.start.argument_parser import refusal

    class CacheConfig(BaseModel):
        watermark: float = Field(description="x", lt=1)

    with pytest.raises(ValidationError) as caught:
        CacheConfig(watermark=3)
    message = refusal(caught.value, {"seed": 1, "watermark": 3}, {"watermark": "decode.engine.args.watermark"})
    assert message.startswith("decode.engine.args.watermark: vLLM refuses it: CacheConfig: watermark: ")
    # A field of a draft's settings is not the argument of that name.
    message = refusal(caught.value, {"cache_config": {"watermark": 3}, "watermark": 0.1}, {})
    assert message.startswith("engine.args.cache_config: vLLM refuses it: ")


async def test_the_start_of_an_engine_ends_with_the_key() -> None:
    args = {"watermark": 0.1, "long_prefill_token_threshold": 10**6}
    key = "decode.engine.args.long_prefill_token_threshold"
    engine = VllmEngine(
        str(model_folder.resolve("default")),
        ModelConfig(),
        EngineConfig(args=args),
        producer=False,
        argument_keys={"long_prefill_token_threshold": key},
    )
    try:
        with pytest.raises(UnsupportedEngine) as caught:
            await engine.start()
        assert caught.value.message.startswith(f"{key}: vLLM refuses it: ")
    finally:
        await engine.stop()


def test_an_error_that_names_no_argument_has_the_keys_of_all() -> None:
    from kvferry.engine.vllm.start.argument_parser import refusal

    args: dict[str, Any] = dict.fromkeys(map(str, range(64)), 1)
    message = refusal(RuntimeError("Engine core initialization failed. " * 100), args, {"0": "decode.engine.args.0"})
    assert message.startswith("vLLM did not start: Engine core")
    assert "(given to it: decode.engine.args.0, engine.args.1, " in message
    assert len(message) < 1000
    assert refusal(ValueError("much"), {}, {}) == "vLLM refuses this configuration: much"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            {"max_num_scheduled_tokens": 10**6},
            "max_num_scheduled_tokens: expected at most engine.max_num_batched_tokens (2048), not",
        ),
        ({"num_gpu_blocks_override": 10**6}, "num_gpu_blocks_override: engine.kv_cache_gib holds "),
        ({"numa_bind": True, "numa_bind_nodes": [1]}, "numa_bind_nodes: this machine has no NUMA node 1"),
    ],
)
def test_an_engine_does_not_start_with_what_would_end_it_later(
    args: dict[str, Any], words: str, tmp_path: Path
) -> None:
    from kvferry.engine.vllm.start.arguments import why_not_startable

    (tmp_path / "node0").mkdir()
    engine = EngineConfig(args=args, max_num_batched_tokens=2048)
    assert why_not_startable(config_of(engine), engine, {}, tmp_path).startswith(f"engine.args.{words}")
    fine = EngineConfig(args={"max_num_scheduled_tokens": 200, "num_gpu_blocks_override": 16})
    assert why_not_startable(config_of(fine), fine, {}, tmp_path) == ""


def test_a_variable_that_vllm_does_not_know_is_named() -> None:
    from kvferry.engine.vllm.start.argument_parser import check_variables

    check_variables(dict.fromkeys(FREE_VARIABLES, "1"))
    with pytest.raises(ConfigError, match=r"engine\.env\.VLLM_LOGING_LEVEL.*did you mean VLLM_LOGGING_LEVEL"):
        check_variables({"VLLM_LOGING_LEVEL": "INFO"})


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (EngineConfig(), "UniProcExecutor"),
        (EngineConfig(tensor_parallel_size=3), "MultiprocExecutor"),
        # Threads are bound in the process that vLLM starts for the model.
        (
            EngineConfig(env={"VLLM_CPU_OMP_THREADS_BIND": "0"}),
            "MultiprocExecutor",
        ),
        (
            EngineConfig(env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
            "UniProcExecutor",
        ),
        (EngineConfig(args={"numa_bind": True, "numa_bind_nodes": [0], "numa_bind_cpus": ["0"]}), "MultiprocExecutor"),
    ],
    ids=["one", "ranks", "bound", "not bound", "bound by vLLM"],
)
def test_an_engine_on_a_cpu_computes_in_one_process_where_it_can(
    engine: EngineConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor.abstract import Executor

    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert Executor.get_class(config_of(engine)).__name__ == name


def test_a_variable_of_the_process_that_binds_threads_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.abstract import Executor

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert Executor.get_class(config_of(EngineConfig())).__name__ == "MultiprocExecutor"


def test_the_printed_command_line_is_one_that_vllm_parses() -> None:
    import shlex

    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvferry.engine.vllm.start.command_line import command_line

    config = configuration.parse(
        {
            "model": {"path": "some/model"},
            "engine": {"args": {"seed": 7}, "env": {"VLLM_LOGGING_LEVEL": "INFO"}},
            "decode": {"engine": {"args": {"watermark": 0.5}}},
        }
    )
    words = shlex.split(command_line(config, "decode").replace("\\\n", ""))
    assert words[:4] == ["VLLM_LOGGING_LEVEL=INFO", "vllm", "serve", "some/model"]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[3:])
    assert (parsed.seed, parsed.watermark, parsed.block_size) == (7, 0.5, 32)
    assert parsed.kv_transfer_config is not None
    assert "--watermark" not in command_line(config, "prefill")
    wrong = configuration.parse(
        {
            "model": {"path": "some/model"},
            "decode": {"engine": {"args": {"custom_histogram_buckets": {"nonsense": [1]}}}},
        }
    )
    with pytest.raises(ConfigError, match=r"^decode\.engine\.args\.custom_histogram_buckets: vLLM .*family"):
        command_line(wrong, "decode")


def test_vllm_has_no_ranks_of_data_parallel_to_show_on_a_cpu() -> None:
    """Once it has, `data_parallel_size` need not be refused for models with experts."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = str(model_folder.resolve("default"))
    ranks = {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_address": "127.0.0.1"}
    with pytest.raises(ValueError, match="Non-MoE models do not support external data parallel mode"):
        AsyncEngineArgs(model=model, **ranks).create_engine_config()
    # Experts of several ranks exchange their tokens with it.
    assert CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv
    with pytest.raises(NotImplementedError):
        CpuCommunicator.all_gatherv(object(), [])


def test_vllms_connector_has_no_decode_engine_of_several_stages() -> None:
    """Once it has, `pipeline_parallel_size` can be tested."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    source = " ".join(inspect.getsource(NixlBaseConnectorWorker.__init__).split())
    assert 'kv_role == "kv_consumer": raise NotImplementedError( "NixlPushConnector consumer (decode)' in source


def test_vllm_has_no_engines_over_nodes_on_a_cpu() -> None:
    """Its executors over nodes are Ray's; once CPUs have one, `distributed_executor_backend: ray` can be tested."""
    from vllm.platforms.cpu import CpuPlatform

    assert CpuPlatform.ray_device_key == ""
