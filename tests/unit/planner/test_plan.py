"""Plans: KV sizes, layouts, what binds, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_json import from_config
from kvferry_plan import model_catalogue
from kvferry_plan.planner import answer, emit, kv_dtypes, layouts, models, plan
from kvferry_plan.planner.assumptions import DEFAULTS, describe, with_values
from kvferry_plan.planner.explain import explain
from kvferry_plan.planner.gpu_catalogue import shipped
from kvferry_plan.planner.layouts import Layout
from kvferry_plan.planner.plan import NoPlan
from kvferry_plan.planner.question import priced
from kvferry_plan.planner.roofline import Engine
from kvferry_plan.planner.sizing import Candidate, Miss, size
from support.plan_questions import planned_model, question


@pytest.mark.parametrize(
    ("model", "dtype", "per_token"),
    [
        ("llama-3.1-70b", "fp8", 163_840),
        ("llama-3.1-70b", "auto", 327_680),
        ("llama-3.1-8b", "fp8", 65_536),
        ("llama-3.1-405b", "fp8", 258_048),
        ("deepseek-v3", "auto", 70_272),
        ("qwen3-235b-a22b", "auto", 192_512),
        ("qwen3-30b-a3b", "auto", 98_304),
        ("gemma-3-27b", "auto", 507_904),
        ("gpt-oss-120b", "auto", 73_728),
        ("gpt-oss-20b", "auto", 49_152),
    ],
)
def test_bytes_of_a_token(model: str, dtype: str, per_token: int) -> None:
    asked = question(model, kv_cache_dtype=dtype)
    assert answer.kv_sizes(asked)["kv_bytes_per_token"] == per_token


def test_windows_cap_what_a_long_request_takes() -> None:
    sizes = answer.kv_sizes(question("gemma-3-27b", context=131_072))
    assert sizes["kv_bytes_per_token_past_windows"] == 81_920
    assert sizes["kv_bytes_of_longest_request"] < 0.2 * 507_904 * 131_072


def test_only_legal_layouts_are_planned() -> None:
    model, gpu = planned_model("llama-3.1-70b"), shipped()["h100"]
    sizes = {layout.tensor_parallel_size for layout in layouts.legal(model, gpu)}
    assert sizes == {1, 2, 4, 8}
    assert "64 attention heads" in layouts.refusal(Layout(3), model, gpu)
    assert "a node has 8" in layouts.refusal(Layout(16), model, gpu)
    assert "no experts" in layouts.refusal(Layout(2, 1, True), model, gpu)
    assert not layouts.refusal(Layout(8, 1, True), planned_model("deepseek-v3"), gpu)


def test_an_illegal_size_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ConfigError, match=r"--tp 3: .*64 attention heads.*legal here: 1, 2, 4, 8"):
        plan.make(question("llama-3.1-70b", tensor_parallel_size=3))


def test_the_pool_is_a_share_of_all_memory_less_the_rest() -> None:
    found = plan.make(question("llama-3.1-8b"))
    parts = found.best.memory
    assert parts.total_bytes == 81_559 << 20
    assert parts.weight_bytes == 2 * 8_030_261_248
    assert parts.kv_bytes == pytest.approx(
        0.9 * parts.total_bytes - parts.weight_bytes - parts.activation_bytes - parts.engine_bytes
    )
    room = found.best.room
    assert room.num_pages_in_all == int(parts.kv_bytes // (131_072 * 16)) - 1


def test_quantized_weights_keep_a_share_in_bfloat16() -> None:
    model = planned_model("llama-3.1-70b", "fp8")
    # 72.66 GB are reported for the 70B in FP8, whose embeddings and head stay in bfloat16.
    assert model.weight_bytes(DEFAULTS) == pytest.approx(72.66e9, rel=0.01)


def test_touched_experts_follow_the_batch() -> None:
    model = planned_model("qwen3-30b-a3b")
    assert model.touched_share(1) == pytest.approx(8 / 128)
    assert model.touched_share(16) == pytest.approx(1 - (1 - 8 / 128) ** 16)
    assert model.touched_bytes(1, DEFAULTS) == pytest.approx(2 * model.num_active_parameters, rel=1e-9)
    assert model.touched_bytes(100_000, DEFAULTS) == pytest.approx(2 * model.num_parameters, rel=1e-6)


def test_a_decode_step_reads_weights_and_kv() -> None:
    model, gpu = planned_model("llama-3.1-8b"), shipped()["h100"]
    engine = Engine(model, gpu, Layout(1), "bfloat16", DEFAULTS)
    roof = engine.decode_step(16, 4096)
    assert roof.memory_s == pytest.approx((2 * 8_030_261_248 + 16 * 4096 * 131_072) / (3.35e12 * 0.75))
    assert roof.binds == "memory bandwidth"
    assert engine.prefill(8192).binds == "compute"
    assert roof.link_s == 0
    assert Engine(model, gpu, Layout(2), "bfloat16", DEFAULTS).decode_step(16, 4096).link_s > 0


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "gptq", "bits": 3}, None),
        ({"quant_method": "gptq"}, None),
        ({"quant_method": "modelopt"}, None),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
    ],
)
def test_weights_are_as_wide_as_the_checkpoint_says(quantization: dict[str, Any], weights: str | None) -> None:
    entry = model_catalogue.find("llama-3.1-8b")
    assert entry is not None
    geometry = from_config(entry.config | {"quantization_config": quantization})
    if weights is None:
        with pytest.raises(ConfigError, match="give --weights"):
            models.planned(geometry, None, 8_000_000_000, None)
    else:
        model = models.planned(geometry, None, 8_000_000_000, None)
        assert model.weights == weights
        if quantization["quant_method"] in ("gptq", "awq"):  # of weights alone
            assert shipped()["h100"].flops_of(model.compute_dtype())[1] == "bfloat16"


def test_auto_is_the_type_of_pages_that_the_checkpoint_declares() -> None:
    asked = question()
    geometry = dataclasses.replace(asked.model.geometry, checkpoint_kv_dtype="fp8_e4m3")
    asked = asked.with_changes(model=dataclasses.replace(asked.model, geometry=geometry))
    found = plan.make(asked)
    assert asked.kv_dtype == "fp8_e4m3"
    assert emit.obstacles(found.best, asked) == []
    engine = emit.configuration_of(found.best, asked, model_path="m", served_name="m")["engine"]
    assert engine["kv_cache_dtype"] == "fp8_e4m3"
    own = asked.with_changes(kv_cache_dtype="bfloat16")
    assert emit.obstacles(found.best, own) == []
    engine = emit.configuration_of(found.best, own, model_path="m", served_name="m")["engine"]
    assert engine["kv_cache_dtype"] == "bfloat16"


def test_attention_is_computed_in_the_models_type_whatever_the_weights_are() -> None:
    gpu, tokens = shipped()["h100"], 8192
    model = planned_model("llama-3.1-8b", "fp8")
    roof = Engine(model, gpu, Layout(1), "bfloat16", DEFAULTS).prefill(tokens)
    linear_s = 2 * model.num_active_parameters * tokens / gpu.flops["fp8"]
    attention_s = model.attention_flops(tokens) / gpu.flops["bfloat16"]
    assert roof.compute_s == pytest.approx((linear_s + attention_s) / DEFAULTS.prefill_mfu)
    step = Engine(model, gpu, Layout(1), "bfloat16", DEFAULTS).decode_step(4, tokens)
    linear_s = 2 * model.num_active_parameters * 4 / gpu.flops["fp8"]
    attention_s = 4 * model.attention_flops(1, tokens - 1, is_decode=True) / gpu.flops["bfloat16"]
    assert step.compute_s == pytest.approx((linear_s + attention_s) / DEFAULTS.decode_mfu)


def test_weights_of_four_bits_are_computed_in_bfloat16_without_kernels_of_four() -> None:
    """MXFP4's experts by default everywhere: vLLM prefers its kernels with bfloat16 activations."""
    for name, gpu, dtype in (
        ("nvfp4", "h100", "bfloat16"), ("nvfp4", "b200", "fp4"), ("mxfp4", "h100", "bfloat16"),
        ("mxfp4", "b200", "bfloat16"), ("mxfp4", "mi355x", "bfloat16"),
    ):  # fmt: skip
        compute = planned_model("llama-3.1-8b", name).compute_dtype()
        assert shipped()[gpu].flops_of(compute)[1] == dtype, (name, gpu)


def test_latents_are_unfolded_for_prefill_and_not_for_decode() -> None:
    model = planned_model("deepseek-v3")
    # 61 layers, 128 heads; K of 128 + 64 values and V of 128, or scores and output over the latent of 512.
    assert model.attention_flops(100) == 5050 * 61 * 128 * 2 * (192 + 128)
    assert model.attention_flops(1, 99, is_decode=True) == 100 * 61 * 128 * 2 * (576 + 512)
    # Sparse attention is computed over latents in both.
    sparse = planned_model("deepseek-v3.2")
    assert sparse.attention_flops(1, 99) == sparse.attention_flops(1, 99, is_decode=True)


@pytest.mark.parametrize("users", [8, 64, 512])
def test_a_ttft_that_only_idle_engines_keep_is_missed(users: int) -> None:
    asked = question(
        "llama-3.1-70b", weights="int4", gpus=("h200",), users=users, context=32_768, ttft_s=2.0, mode="aggregated"
    )
    found = size(asked, "h200", Layout(8), disaggregated=False)
    assert isinstance(found, Miss)
    assert found.what == "TTFT"
    assert found.factor > 1.1
    assert re.search(r"with 5% of the load .* only \d+ nearly idle engines keep", found.message)
    with pytest.raises(NoPlan, match="TTFT"):
        plan.make(asked)
    # The limit is an assumption, and a single engine that is enough is a plan however idle it is.
    anyway = asked.with_changes(assumptions=with_values({"least_load": 0}))
    kept = size(anyway, "h200", Layout(8), disaggregated=False)
    assert isinstance(kept, Candidate)
    assert kept.prefill_use < 0.05
    alone = size(
        question("llama-3.1-70b", weights="int4", gpus=("h200",), context=32_768, rate_per_s=0.001, ttft_s=2.0),
        "h200", Layout(8), disaggregated=False,
    )  # fmt: skip
    assert isinstance(alone, Candidate)
    assert alone.num_gpus == 8


def test_what_one_engine_binds_is_what_smaller_ones_miss() -> None:
    asked = question("llama-3.1-70b", gpus=("h100",), users=64, context=32_768, prompt="8000:28000")
    best = plan.make(asked).best
    assert best.num_decode == 1
    assert best.binds.startswith("prefill: TTFT")
    assert "room to spare" in plan.make(question("llama-3.1-8b")).best.binds
    # The smallest size here holds the model and one request, and decodes too slowly.
    slow = plan.make(question("llama-3.1-70b", gpus=("h200",), context=4096, tpot_s=0.02, ttft_s=60.0)).best
    assert slow.binds.startswith("decode: one engine has room to spare")
    assert "misses TPOT by" in slow.binds


def test_several_aggregated_engines_for_the_ttft_say_so() -> None:
    asked = question(
        "llama-3.1-8b", users=64, ttft_s=0.6, mode="aggregated", tensor_parallel_size=1, pipeline_parallel_size=1
    )
    best = plan.make(asked).best
    assert best.num_decode > 1
    assert best.binds == "prefill: TTFT"
    assert plan.make(asked.with_changes(demand=dataclasses.replace(asked.demand, ttft_s=60.0))).best.num_decode < (
        best.num_decode
    )


def test_an_explanation_adds_up() -> None:
    asked = question("llama-3.1-70b", weights="fp8", gpus=("h200",), users=64, context=32_768, ttft_s=2.0)
    said = {each.name: each for each in explain(plan.make(asked))}

    def seconds(text: str) -> float:
        number, unit = text.split()
        return float(number) / (1000 if unit == "ms" else 1)

    parts = [seconds(said[name].value) for name in ("its products with weights", "its attention", "its links")]
    overhead_s = asked.assumptions.prefill_overhead_s
    assert sum(parts) + overhead_s == pytest.approx(seconds(said["prefill of the mean prompt"].value), rel=1e-3)
    terms = [seconds(each) for each in said["TTFT, 99% of requests"].numbers.split(" + ")]
    assert sum(terms) == pytest.approx(seconds(said["TTFT, 99% of requests"].value), rel=1e-3)
    assert seconds(said["wait for prefill"].value) == pytest.approx(terms[1])
    assert "TFLOP/s in bfloat16" in said["its attention"].numbers
    assert "TFLOP/s in fp8" in said["its products with weights"].numbers


def test_attention_counts_pairs_of_tokens() -> None:
    model = planned_model("llama-3.1-8b")
    # Of 100 tokens: 100 * 101 / 2 pairs, 32 layers, 32 heads, 2 * (128 + 128) FLOPs.
    assert model.attention_flops(100) == 5050 * 32 * 32 * 512
    assert model.attention_flops(60, 40) == pytest.approx(model.attention_flops(100) - model.attention_flops(40))
    gemma = planned_model("gemma-3-27b")
    assert gemma.attention_flops(8192) < 0.5 * gemma.attention_flops(16384)


def test_an_objective_that_nobody_meets_says_by_how_much() -> None:
    with pytest.raises(NoPlan, match=r"TPOT: h100 TP 8: a decode step of one request takes .* ms; --tpot is 0.1 ms"):
        plan.make(question("llama-3.1-70b", tpot_s=1e-4))
    with pytest.raises(NoPlan, match=r"TTFT of .* s with any number of engines .* times too much"):
        plan.make(question("llama-3.1-70b", context=131_072, ttft_s=1.0))


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(NoPlan, match=r"GPU memory: l40s .* are usable \(.* times too much\)"):
        plan.make(question("llama-3.1-405b", gpus=("l40s",), pipeline_parallel_size=1))


def test_a_dtype_without_a_backend_is_named() -> None:
    with pytest.raises(NoPlan, match=r"attention backend: mi300x .*nvfp4 has no attention backend on ROCm"):
        plan.make(question(gpus=("mi300x",), kv_cache_dtype="nvfp4"))


def test_a_budget_and_a_number_of_gpus_are_kept() -> None:
    with pytest.raises(NoPlan, match=r"budget: .*--budget is 1 \("):
        plan.make(question(gpus=("h100",), budget_usd_per_hour=1.0))
    with pytest.raises(NoPlan, match="no price known: give --price or a catalogue file"):
        plan.make(question(gpus=("h200",), budget_usd_per_hour=100.0))
    with pytest.raises(NoPlan, match="--max-gpus is 1"):
        plan.make(question("llama-3.1-70b", max_gpus=1))
    cheap = question(gpus=("h200",), budget_usd_per_hour=100.0)
    found = plan.make(cheap.with_changes(gpus=priced(cheap.gpus, {"h200": 3.0})))
    assert found.best.usd_per_hour == 3.0 * found.best.num_gpus


def test_costs_rank_before_candidates_without_a_price() -> None:
    found = plan.make(question(gpus=("h200", "h100", "b200"), users=64))
    costs = [candidate.usd_per_hour for candidate in found.candidates]
    known = [cost for cost in costs if cost is not None]
    assert costs[: len(known)] == sorted(known)
    assert known
    assert all(cost is None for cost in costs[len(known) :])


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes 131072 tokens"):
        question("llama-3.1-8b", context=200_000)


@pytest.mark.parametrize("name", ["block_size", "max_num_seqs", "max_gpus", "gpu_memory_utilization"])
def test_settings_have_limits(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        question(**{name: 0})


def test_restored_prefixes_need_a_tier_and_take_time() -> None:
    with pytest.raises(ConfigError, match="needs a tier"):
        question(restored_share=0.5)
    restored = plan.make(question(users=64, restored_share=0.8, cpu_tier_bytes=1 << 40))
    computed = plan.make(question(users=64))
    assert restored.best.ttft.load_s > 0
    assert restored.best.prefill.total_s < computed.best.prefill.total_s
    assert restored.best.restore_bytes_s > 0
    tiers = {tier.name: tier for tier in restored.tiers()}
    assert tiers["cpu"].num_bytes == restored.best.num_nodes << 40


def test_nvme_binds_where_restores_need_more_than_it_reads() -> None:
    slow = with_values({"volume_bytes_s": 1e6})
    asked = question(users=256, restored_share=0.8, volume_tier_bytes=1 << 42, ttft_s=3000, assumptions=slow)
    assert plan.make(asked).best.binds == "restored prefixes: NVMe"


def test_the_network_binds_where_transfers_need_more_than_it_carries() -> None:
    slow = with_values({"network_efficiency": 1e-3})
    asked = question(
        users=2000, ttft_s=60, output="16", prompt="4000", mode="disaggregated", assumptions=slow,
        tensor_parallel_size=1, pipeline_parallel_size=1,
    )  # fmt: skip
    assert plan.make(asked).best.binds == "KV transfer: network"


def test_changes_name_what_would_save_most() -> None:
    found = plan.make(question("llama-3.1-70b", users=256, context=32_768, ttft_s=10))
    assert found.changes
    assert [change.saving for change in found.changes] == sorted((c.saving for c in found.changes), reverse=True)
    again = plan.make(question("llama-3.1-70b", users=256, context=32_768, ttft_s=10, kv_cache_dtype="fp8"))
    named = next(change for change in found.changes if change.what.startswith("KV pages in fp8"))
    assert named.candidate.num_gpus == again.best.num_gpus


def test_an_answer_is_plain_json_and_every_number_is_explained() -> None:
    found = plan.make(question("deepseek-v3", gpus=("h200",), users=32, context=16_384, weights="fp8", ttft_s=10))
    decoded = json.loads(json.dumps(answer.as_json(found), allow_nan=False))
    assert decoded["layouts"][0]["gpus"] == found.best.num_gpus
    assert {each["tier"] for each in decoded["tiers"]} == {"device"}
    names = [each.name for each in explain(found)]
    assert {"KV bytes of a token", "decode step", "prefill of the mean prompt", "decode engines"} <= set(names)
    assert all(each.formula and each.numbers and each.value for each in explain(found))


def test_assumptions_can_be_set_within_limits() -> None:
    assert with_values({"prefill_mfu": 0.4}).prefill_mfu == 0.4
    with pytest.raises(ConfigError, match="unknown; known are"):
        with_values({"mfu": 0.4})
    with pytest.raises(ConfigError, match="not within"):
        with_values({"prefill_mfu": 1.4})
    assert len(describe(DEFAULTS)) == 18


@pytest.mark.parametrize(
    ("dtype", "gpu", "weights", "runs"),
    [
        ("fp8", "h100", "bfloat16", True),
        ("fp8_e5m2", "h100", "bfloat16", True),
        ("fp8_e5m2", "h100", "fp8", False),
        ("fp8_per_token_head", "a100", "bfloat16", False),
        ("int8_per_token_head", "a100", "bfloat16", True),
        ("int8_per_token_head", "cpu-node", "bfloat16", False),
        ("nvfp4", "b200", "bfloat16", True),
        ("nvfp4_4over6", "h100", "bfloat16", False),
        ("turbo", "h100", "bfloat16", False),
        ("float32", "h100", "bfloat16", False),
        ("float32", "cpu-node", "float32", True),
    ],
)
def test_which_dtype_runs_where(dtype: str, gpu: str, weights: str, runs: bool) -> None:
    found = kv_dtypes.support(dtype, shipped()[gpu], weights=weights)
    assert found.runs is runs
    assert bool(found.backends) is runs
    assert bool(found.refusal) is not runs


def test_fp8_on_ampere_is_warned_of() -> None:
    found = plan.make(question(gpus=("a100",), kv_cache_dtype="fp8"))
    assert "not settled" in found.best.warnings[0]


@settings(max_examples=40, deadline=None)
@given(
    users=st.integers(1, 2000),
    context=st.integers(256, 65_536),
    ttft_s=st.floats(0.2, 60),
    tpot_s=st.floats(0.005, 0.5),
    share=st.floats(0, 0.9),
    disaggregated=st.booleans(),
    tensor=st.sampled_from([1, 2, 4, 8]),
)
def test_what_is_planned_meets_the_demand(
    users: int, context: int, ttft_s: float, tpot_s: float, share: float, disaggregated: bool, tensor: int
) -> None:
    """A candidate keeps objectives, pages and use; one engine less of a role breaks one of them."""
    asked = question(users=users, context=context, ttft_s=ttft_s, tpot_s=tpot_s, prefix_share=share)
    found = size(asked, "h100", Layout(tensor), disaggregated=disaggregated)
    if isinstance(found, Miss):
        assert found.factor > 1
        return
    assert found.ttft.total_s <= ttft_s
    assert found.tpot_s <= tpot_s * 1.0001
    assert found.batch <= found.max_batch_of_pages * 1.0001 + 1e-6
    assert found.prefill_use < asked.assumptions.utilization_limit + 1e-9
    tokens_s = found.num_decode * found.batch / found.tpot_s
    assert tokens_s == pytest.approx(asked.demand.rate_per_s * asked.demand.output.mean, rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(users=st.integers(1, 1000), more=st.integers(1, 1000))
def test_more_users_never_need_fewer_gpus(users: int, more: int) -> None:
    def gpus(count: int) -> float:
        found = size(question(users=count), "h100", Layout(1), disaggregated=True)
        return found.num_gpus if isinstance(found, Candidate) else math.inf

    assert gpus(users) <= gpus(users + more)


def test_a_model_without_counts_says_what_to_give() -> None:
    from kvferry_plan.planner.models import planned

    geometry: Any = dataclasses.replace(planned_model("qwen3-30b-a3b").geometry, num_parameters=None)
    with pytest.raises(ConfigError, match="give --parameters"):
        planned(geometry, None, None, None)
    with pytest.raises(ConfigError, match="give --active-parameters"):
        planned(geometry, None, 30_000_000_000, None)
    with pytest.raises(ConfigError, match="--weights 'int3'"):
        planned(geometry, "int3", 30_000_000_000, 3_000_000_000)
    assert planned(geometry, "bf16", 30_000_000_000, 3_000_000_000).weights == "bfloat16"


def test_a_vocabulary_that_the_ranks_cannot_share_is_refused() -> None:
    # 100,352 rows are a multiple of vLLM's padding, and no multiple of 5; 40 query and 10 KV heads are.
    said = layouts.refusal(Layout(5), planned_model("phi-4"), shipped()["h100"])
    assert "padded to 100352 rows" in said
