"""`engine.args` against vLLM: every argument has a rule, and values reach vLLM's configuration with its own types."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from kvferry import config as configuration
from kvferry import model_folder
from kvferry.config import EngineConfig, ModelConfig
from kvferry.errors import ConfigError
from kvferry.pages.exchange import ARGUMENTS
from kvferry.vllm_arguments import FREE_VARIABLES, RULES, Rule

pytest.importorskip("vllm")

pytestmark = pytest.mark.model

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


def vllm_config_of(engine: EngineConfig) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from kvferry.engine.vllm.arguments import engine_arguments

    arguments = engine_arguments(
        str(model_folder.resolve("default")),
        ModelConfig(),
        engine,
        kv_transfer={},
        events_endpoint="ipc:///tmp/a",
        replay_endpoint="ipc:///tmp/b",
    )
    for name in ("kv_transfer_config", "kv_events_config", "worker_extension_cls"):
        arguments.pop(name)
    return AsyncEngineArgs(**arguments).create_engine_config()


def test_every_argument_of_vllm_has_a_rule_and_no_other_has() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert set(RULES) == {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_every_argument_that_may_be_given_is_one_of_vllms_command_line() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = {action.dest for action in AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._actions}
    assert {name for name, rule in RULES.items() if rule in (Rule.FREE, Rule.EQUAL)} <= known


def test_ten_arguments_reach_the_engines_configuration() -> None:
    from kvferry.engine.vllm.plugins.exchange_fields import exchange_fields

    plain, given = vllm_config_of(EngineConfig()), vllm_config_of(EngineConfig(args=TEN))
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
        ({"kv_cache_metrics": "yes"}, "engine.args.kv_cache_metrics: vLLM refuses it"),
    ],
)
def test_a_value_that_vllm_refuses_is_named_with_its_reason(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vllm_config_of(EngineConfig(args=args))
    assert words in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_variable_that_vllm_does_not_know_is_named() -> None:
    from kvferry.engine.vllm.argument_parser import check_variables

    check_variables(dict.fromkeys(FREE_VARIABLES, "1"))
    with pytest.raises(ConfigError, match=r"engine\.env\.VLLM_LOGING_LEVEL.*did you mean VLLM_LOGGING_LEVEL"):
        check_variables({"VLLM_LOGING_LEVEL": "INFO"})


def test_the_printed_command_line_is_one_that_vllm_parses() -> None:
    import shlex

    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvferry.engine.vllm.command_line import command_line

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
    """Once it has, `pipeline_parallel_size` can be shown."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    source = " ".join(inspect.getsource(NixlBaseConnectorWorker.__init__).split())
    assert 'kv_role == "kv_consumer": raise NotImplementedError( "NixlPushConnector consumer (decode)' in source


def test_vllm_has_no_engines_over_nodes_on_a_cpu() -> None:
    """Its executors over nodes are Ray's; once CPUs have one, `distributed_executor_backend: ray` can be shown."""
    from vllm.platforms.cpu import CpuPlatform

    assert CpuPlatform.ray_device_key == ""
