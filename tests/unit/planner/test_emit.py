"""What a plan emits is what kvferry's configuration takes."""

from __future__ import annotations

import shlex

import pytest

from kvferry import config as configuration
from kvferry.errors import ConfigError
from kvferry_plan.planner import emit, plan
from support.plan_questions import question

NAMES = {"model_path": "meta-llama/Llama-3.1-8B", "served_name": "llama"}


def test_a_serve_file_has_counts_beside_a_configuration_that_is_taken() -> None:
    asked = question(users=128, mode="disaggregated", tensor_parallel_size=1, pipeline_parallel_size=1)
    best = plan.make(asked).best
    (application,) = emit.serve(best, asked, **NAMES)["applications"]
    config = configuration.parse(application["args"]["config"])
    assert config.engine.device == "gpu"
    assert config.engine.block_size == 16
    assert config.model.max_model_len == 8192
    assert config.engine.max_num_seqs == min(best.max_batch_of_pages, best.max_batch_of_tpot)
    counts = {each["name"]: each["num_replicas"] for each in application["deployments"]}
    assert counts == {"PrefillWorker": best.num_prefill, "DecodeWorker": best.num_decode, "Gateway": 1}


def test_settings_go_over_what_is_emitted_and_are_checked() -> None:
    asked = question()
    best = plan.make(asked).best
    content = emit.serve(best, asked, **NAMES, settings=("engine.kind=sim", "membership.endpoints=[127.0.0.1:2379]"))
    assert content["applications"][0]["args"]["config"]["membership"]["endpoints"] == ["127.0.0.1:2379"]
    with pytest.raises(ConfigError, match="blok_size: unknown key"):
        emit.serve(best, asked, **NAMES, settings=("engine.blok_size=1",))


def test_an_aggregated_plan_has_no_prefill_workers() -> None:
    asked = question(mode="aggregated")
    content = emit.values(plan.make(asked).best, asked, **NAMES)
    assert content["aggregated"] is True
    assert content["roles"]["prefill"] == {"replicas": 0}
    assert "tier" not in content


def test_tiers_are_divided_among_the_workers_of_a_pod() -> None:
    asked = question(cpu_tier_bytes=800 << 30, volume_tier_bytes=1000 << 30, tensor_parallel_size=2)
    tier = emit.values(plan.make(asked).best, asked, **NAMES)["tier"]
    assert tier["cpuGiB"] == 200
    assert tier["volumes"][0]["capacityGiB"] == 1000


def test_what_kvferry_does_not_serve_is_said() -> None:
    def obstacles(**options: object) -> str:
        asked = question(**options)  # type: ignore[arg-type]  # options of a question
        return "; ".join(emit.obstacles(plan.make(asked).best, asked))

    assert obstacles() == ""
    assert "one pipeline stage" in obstacles(pipeline_parallel_size=2)
    assert obstacles(kv_cache_dtype="fp8") == ""
    assert "not in int8_per_token_head" in obstacles(kv_cache_dtype="int8_per_token_head")
    others = frozenset({"Qwen3ForCausalLM"})
    assert "tiers keep no pages of LlamaForCausalLM" in obstacles(tier_architectures=others, cpu_tier_bytes=1 << 34)
    assert obstacles(tier_architectures=others) == ""


def test_commands_of_vllm_say_how_many_of_each() -> None:
    asked = question(users=256, mode="disaggregated", kv_cache_dtype="fp8")
    best = plan.make(asked).best
    lines = emit.vllm_commands(best, asked, model_path="org/model").splitlines()
    assert lines[0].startswith(f"# {best.num_prefill} x prefill")
    assert lines[2].startswith(f"# {best.num_decode} x decode")
    words = shlex.split(lines[1])
    assert words[:3] == ["vllm", "serve", "org/model"]
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8"


def test_a_cpu_node_is_emitted_for_the_cpu_engine() -> None:
    asked = question("smollm2-135m-instruct", gpus=("cpu-node",), context=1024, block_size=32, tpot_s=1.0)
    best = plan.make(asked).best
    config = emit.configuration_of(best, asked, **NAMES)
    assert config["engine"]["device"] == "cpu"
    configuration.parse(config)
    assert emit.values(best, asked, **NAMES)["roles"]["decode"]["gpusPerWorker"] == 0
