"""The command `kvferry plan`: exit codes, inputs and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from kvferry.cli import main
from kvferry.errors import ConfigError
from kvferry_plan.commands import inputs

ROOT = Path(__file__).resolve().parents[3]
GPUS = ROOT / "services" / "kvferry_plan" / "planner" / "gpus.yaml"
SCENARIOS = ROOT / "loadtest" / "kvferry_loadtest" / "scenarios"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


def planned(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*words: str, code: int = 2) -> str:
    result = run(*words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def test_the_answer_has_the_bytes_of_a_token() -> None:
    found = planned("llama-3.1-70b", "--context", "131072", "--kv-cache-dtype", "fp8")
    assert found["kv_bytes_per_token"] == 163_840
    assert found["kv_bytes_of_longest_request"] == 131_072 * 163_840


def test_a_table_says_what_binds_what_would_help_and_what_is_assumed() -> None:
    shown = run("llama-3.1-70b", "--users", "64", "--gpu", "h100", "--bars", "--explain")
    assert shown.exit_code == 0
    for words in ("binds", "next best", "assumed", "price", "memory of one GPU", "decode step", "prefill_mfu 0.5"):
        assert words in shown.stdout
    assert "not measurements on GPUs" in shown.stdout


def test_bad_input_is_named() -> None:
    assert "names like it: Llama-3.1" in refused("llama-3.1-71b")
    assert "MODEL is missing" in refused()
    assert "legal here: 1, 2, 4, 8" in refused("llama-3.1-70b", "--tp", "3", "--gpu", "h100")
    assert "unknown; known are a100" in refused("llama-3.1-8b", "--gpu", "h300")
    assert "expected NAME=NUMBER" in refused("llama-3.1-8b", "--assume", "prefill_mfu")
    assert "--profile 'chats'" in refused("llama-3.1-8b", "--profile", "chats")
    assert "either --users" in refused("llama-3.1-8b", "--users", "3", "--rate", "3")
    assert "times too much" in refused("llama-3.1-405b", "--tpot", "0.001", code=1)
    assert "vLLM 0.32 has no KV cache dtype" in refused("llama-3.1-8b", "--kv-cache-dtype", "fp7")
    assert "--tpot 50: expected 0.0001 to 5 seconds, such as 0.05 for 50 ms" in refused("llama-3.1-8b", "--tpot", "50")


def test_a_config_without_heads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    assert "num_attention_heads" in refused(str(tmp_path))


def test_what_kvferry_does_not_serve_is_not_emitted() -> None:
    said = refused("llama-3.1-8b", "--gpu", "b200", "--kv-cache-dtype", "nvfp4", "--emit", "values.yaml")
    assert "not in nvfp4" in said
    assert "--emit vllm" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "a=b"], "--set counts with --emit serve.yaml alone"),
        (["--emit", "vllm", "--set", "a=b"], "--set counts with --emit serve.yaml alone"),
        (["--emit", "vllm", "--plot", "plot.png"], "--emit prints one thing only; leave out --plot"),
        (["--emit", "vllm", "--json", "--bars"], "--emit prints one thing only; leave out --bars, --json"),
        (["--emit", "serve.yaml", "--explain"], "--emit prints one thing only; leave out --explain"),
    ],
)
def test_options_that_would_count_for_nothing_are_refused(options: list[str], said: str) -> None:
    assert said in refused("llama-3.1-8b", "--gpu", "h100", *options)


def test_published_figures_are_listed() -> None:
    shown = run("--published")
    assert shown.exit_code == 0
    assert "003.ctx.405b.4k" in shown.stdout
    assert "x 0.656" in shown.stdout
    assert "53 do not hold" in shown.stdout
    listed = json.loads(run("--published", "--json").stdout)
    assert len(listed) == 358
    assert sum(each["kind"] == "error" for each in listed) == 53


@pytest.mark.parametrize("listed", ["gpus", "profiles", "rules", "settings"])
def test_the_data_are_shown(listed: str) -> None:
    shown = run("--list", listed)
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) > 10


def test_a_profile_gives_demand_and_tiers() -> None:
    found = planned("llama-3.1-8b", "--profile", "rag", "--users", "32", "--gpu", "h200")
    assert found["demand"]["context_tokens"] == 32_768
    assert found["demand"]["ttft_s"] == 2.0
    assert {tier["tier"] for tier in found["tiers"]} == {"device", "cpu", "volume"}
    assert found["layouts"][0]["disaggregated"]


def test_options_go_before_a_profile() -> None:
    found = planned("llama-3.1-8b", "--profile", "chat", "--users", "8", "--ttft", "3", "--gpu", "h100")
    assert (found["demand"]["ttft_s"], found["demand"]["tpot_s"]) == (3.0, 0.03)


def test_a_trace_gives_lengths_and_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 * i, "input_length": 1000 + i, "output_length": 100} for i in range(101)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    demand = planned("llama-3.1-8b", "--trace", str(trace), "--gpu", "h100")["demand"]
    assert demand["prompt_tokens"]["mean"] == 1050
    assert demand["rate_per_s"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no requests"),
        ("{", "line 1: expected a JSON object"),
        ("[]", "line 1: expected a JSON object"),
        ('{"input_length": -1, "output_length": 1}', "line 1: expected input_length"),
        ('{"input_length": 1, "output_length": true}', "line 1: expected output_length"),
        ('{"input_length": 1, "output_length": 1}\n{"a": 1}', "line 2: expected input_length"),
    ],
)
def test_a_bad_trace_is_refused_by_line(content: str, says: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(content)
    assert says in refused("llama-3.1-8b", "--trace", str(trace))


def test_a_trace_has_a_limit_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs.workload, "MAX_SAMPLES", 3)
    trace = tmp_path / "trace.jsonl"
    line = '{"input_length": 1, "output_length": 1}\n'
    trace.write_text(line * 3)
    inputs.read_trace(trace)
    trace.write_text(line * 4)
    with pytest.raises(ConfigError, match="over 3 requests"):
        inputs.read_trace(trace)


@pytest.mark.parametrize("name", ["rag-chat", "chat", "agent", "batch-summarise"])
def test_scenarios_of_the_harness_are_read(name: str) -> None:
    load = inputs.read_scenario(SCENARIOS / f"{name}.toml")
    assert load.prompt.mean > 100
    # A closed loop has no rate.
    assert (load.rate_per_s is None) == (name == "batch-summarise")


def test_the_rag_scenario_has_the_published_prompts() -> None:
    load = inputs.read_scenario(SCENARIOS / "rag-chat.toml")
    # 1,500 + 8,192 tokens, six turns of 200, 32-token answers between them; 12 requests a second.
    assert load.prompt.mean == 1500 + 8192 + 3.5 * 200 + 2.5 * 32
    assert load.rate_per_s == 12.0
    assert load.ttft_s == 0.4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("kind = 'burst'", "expected a scenario of kind rag, chat, agent, documents"),
        ("kind = 'rag'", "expected a scenario of kind"),
        ("kind = 'rag'\n[rag]\nturns = 3", "rag.system_tokens: missing"),
        ("kind = 'chat'\n[chat]\nsystem_tokens = -1", "expected a number"),
        ("=", "--scenario"),
    ],
)
def test_a_bad_scenario_is_refused(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(content)
    assert says in refused("llama-3.1-8b", "--scenario", str(file))


def test_a_catalogue_of_the_user_wins(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text("gpus: {h200: {prices: [{usd_per_hour: 3}]}}")
    found = planned("llama-3.1-8b", "--gpu", "h200", "--catalogue", str(file))
    assert found["layouts"][0]["usd_per_hour"] == 3
    assert found["layouts"][0]["price"]["kind"] == "own"
    assert "--catalogue" in refused("llama-3.1-8b", "--catalogue", str(tmp_path / "none.yaml"))


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    assert run("llama-3.1-8b", "--gpu", "h100", "--plot", str(file)).exit_code == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "No such file" in refused("llama-3.1-8b", "--gpu", "h100", "--plot", str(tmp_path / "no" / "x.png"))


def test_cpus_compute_and_store_in_float32() -> None:
    found = planned("default", "--gpu", "cpu-node", "--context", "1024", "--tpot", "1", "--kv-cache-gib", "1")
    assert (found["weights"], found["kv_cache_dtype"], found["kv_bytes_per_token"]) == ("float32", "float32", 46_080)
    assert found["layouts"][0]["gpu_memory_bytes"]["kv"] == 1 << 30
    assert found["layouts"][0]["served_by_kvferry"]


def test_calibration_needs_one_gpu_and_a_deployment() -> None:
    assert "name the GPU that serves there" in refused("llama-3.1-8b", "--calibrate", "http://127.0.0.1:1")
    words = ("llama-3.1-8b", "--gpu", "h100", "--calibrate", "http://127.0.0.1:1")
    assert "32 attention heads cannot be divided" in refused(*words, "--tp", "3")
    assert "--tp 0: TP 1 to 64" in refused(*words, "--tp", "0")
    said = refused("default", "--gpu", "cpu-node", "--context", "1024", "--calibrate", "http://127.0.0.1:1", code=1)
    assert "--calibrate http://127.0.0.1:1" in said


def test_headroom_is_a_share_of_the_pages() -> None:
    words = ("llama-3.1-8b", "--gpu", "h100", "--users", "64", "--tp", "1", "--pp", "1", "--mode", "aggregated")
    most = [planned(*words, "--headroom", share)["layouts"][0]["max_requests_by_kv_pages"] for share in ("0", "0.5")]
    assert most[1] == pytest.approx(most[0] / 2, rel=0.1)
    assert "--headroom 1: expected 0 to 0.95" in refused(*words, "--headroom", "1")


def test_a_profile_says_which_dtype_it_wants() -> None:
    shown = run("llama-3.1-8b", "--profile", "rag", "--users", "8", "--gpu", "h100")
    assert "wants KV pages in fp8" in shown.stdout


def test_a_layout_that_one_kind_of_gpu_cannot_have_is_no_error_of_the_others() -> None:
    words = ("llama-3.1-70b", "--tp", "8")
    assert all(layout["layout"].startswith("TP 8") for layout in planned(*words)["layouts"])
    assert "--tp 8: TP 8: a node has 4" in refused(*words, "--gpu", "gb200")


def test_kv_memory_that_no_gpu_has_is_refused_with_both_figures() -> None:
    words = ("llama-3.1-8b", "--gpu", "h100", "--tp", "1", "--pp", "1")
    said = refused(*words, "--kv-cache-gib", "100000", code=1)
    assert "asks for 107374.2 GB of each GPU" in said
    assert "leave 6" in said
    assert planned(*words, "--kv-cache-gib", "60")["layouts"]
    refused(*words, "--kv-cache-gib", "64", code=1)


@pytest.mark.parametrize(
    "option", ["--budget", "--max-gpus", "--context", "--block-size", "--max-num-batched-tokens", "--kv-cache-gib"]
)
def test_zero_is_no_default(option: str) -> None:
    assert f"{option} 0: expected" in refused("llama-3.1-8b", "--gpu", "h100", option, "0")


def test_more_users_than_the_limit_of_engines_serves_are_named_so() -> None:
    said = refused("llama-3.1-70b", "--gpu", "h100", "--users", "1e7", "--mode", "aggregated", code=1)
    assert "engines of a role would be needed" in said
    assert "inf" not in said


@pytest.mark.parametrize("key", ["title", "source"])
def test_texts_of_a_catalogue_have_no_lines_of_their_own(key: str, tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text(f'gpus: {{h100: {{{key}: "H100\\nrm -r x"}}}}')
    assert f"gpus.h100.{key}: Value error, control characters" in refused("llama-3.1-8b", "--catalogue", str(file))
    file.write_text('gpus: {"h1\\n\\e[31m": {}}')
    assert "\x1b" not in refused("llama-3.1-8b", "--catalogue", str(file))


def test_texts_of_a_model_have_no_lines_of_their_own(tmp_path: Path) -> None:
    assert "control characters" in refused("a/b\nrm -r x", "--emit", "vllm")
    config = {
        "model_type": "llama", "architectures": ["Llama\x1b[31m"], "num_hidden_layers": 2, "num_attention_heads": 4,
        "hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "'Llama\\x1b[31m': control characters" in refused(str(tmp_path), "--parameters", "1e9")


def test_kinds_of_gpus_of_one_plan_have_a_limit(tmp_path: Path) -> None:
    known = [f"gpu-{i}" for i in range(40)]
    shown = {key: value for key, value in yaml.safe_load(GPUS.read_text())["gpus"]["h100"].items() if key != "prices"}
    file = tmp_path / "gpus.yaml"
    file.write_text(json.dumps({"gpus": {name: {**shown, "source_date": None} for name in known}}))
    words = ("llama-3.1-8b", "--tp", "1", "--pp", "1", "--catalogue", str(file))
    assert "at most 32 are compared; name some with --gpu" in refused(*words)
    names = [word for name in known[:33] for word in ("--gpu", name)]
    assert planned(*words, *names[:64])
    assert "33 kinds of GPUs" in refused(*words, *names)


def test_longest_requests_have_to_fit_the_context(tmp_path: Path) -> None:
    words = ("llama-3.1-8b", "--gpu", "h100", "--context", "8192")
    said = refused(*words, "--prompt", "2000:20000", "--output", "100")
    assert "--context 8192: shorter than the 99th percentile of prompt and answer together, 20100 tokens" in said
    assert planned(*words, "--prompt", "2000:8092", "--output", "100")
    refused(*words, "--prompt", "2000:8093", "--output", "100")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 100, "output_length": 10}\n' * 9 + '{"input_length": 9000, "output_length": 10}')
    assert "99th percentile" in refused(*words, "--trace", str(trace))


@pytest.mark.parametrize("time", ["1" + "0" * 400, "NaN", "Infinity", "-1", "true", '"1"', "1000000000000001"])
def test_a_time_that_is_none_is_refused(time: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"input_length": 1, "output_length": 1, "timestamp": {time}}}')
    assert "line 1: expected timestamp in ms, 0 to 1e+15" in refused("llama-3.1-8b", "--trace", str(trace))


@pytest.mark.parametrize(
    "span",
    ["{min = 1, max = 1" + "0" * 400 + "}", "{min = 1}", "{min = -1" + "0" * 400 + ", max = 1}", "1" + "0" * 400],
)
def test_a_number_of_a_scenario_has_a_limit(span: str, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(f"kind = 'chat'\n[chat]\nsystem_tokens = {span}\nuser_tokens = 1\nanswer_tokens = 1\nturns = 1")
    assert "chat.system_tokens: expected a number" in refused("llama-3.1-8b", "--scenario", str(file))


def test_weights_that_the_checkpoint_lacks_need_one_that_has_them(tmp_path: Path) -> None:
    words = ("llama-3.1-70b", "--gpu", "h200", "--context", "8192", "--weights", "fp8", "--emit")
    for form in ("values.yaml", "serve.yaml", "vllm"):
        said = refused(*words, form)
        assert "weights in fp8, and meta-llama/Meta-Llama-3.1-70B has bfloat16: name a checkpoint" in said
        assert "meta-llama" not in run(*words, form, "--path", "owner/Llama-FP8").stdout
    assert "vllm serve owner/Llama-FP8 " in run(*words, "vllm", "--path", "owner/Llama-FP8").stdout
    # What is there is compared.
    assert "its weights are bfloat16" in refused(*words, "vllm", "--path", "meta-llama/Meta-Llama-3.1-70B")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80, "head_dim": 128,
        "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert str(tmp_path) in run(*words, "vllm", "--path", str(tmp_path)).stdout
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
    assert "its KV pages are not those of Llama-3.1-70B" in refused(*words, "vllm", "--path", str(tmp_path))


def test_16_bits_are_cast_to_16_bits() -> None:
    words = ("llama-3.1-8b", "--gpu", "h100", "--weights", "float16", "--emit")
    assert yaml.safe_load(run(*words, "values.yaml").stdout)["config"]["model"]["dtype"] == "float16"
    assert "--dtype float16" in run(*words, "vllm").stdout
    assert "--dtype" not in run("llama-3.1-8b", "--gpu", "h100", "--emit", "vllm").stdout


def test_weights_of_4_bits_are_served() -> None:
    words = ("llama-3.1-70b", "--gpu", "h100", "--context", "8192", "--weights", "int4")
    assert any(layout["served_by_kvferry"] for layout in planned(*words)["layouts"])


def test_values_of_a_hub_model_fill_a_volume_and_name_placeholders() -> None:
    shown = run("llama-3.1-70b", "--gpu", "h200", "--context", "8192", "--users", "64", "--emit", "values.yaml").stdout
    values = yaml.safe_load(shown)
    weights = values["model"]["weights"]
    assert weights["enabled"]
    assert weights["claim"]["sizeGiB"] > 141e9 / (1 << 30) + 1
    assert values["model"]["hubToken"] == {"secretName": "hub-token"}
    assert values["config"]["model"]["revision"] == "COMMIT"
    comment = shown[: shown.index("image:")]
    for placeholder in ("image.registry", "config.model.revision", "model.weights.claim", "model.hubToken"):
        assert placeholder in comment
    thresholds = values["monitoring"]["alerts"]["thresholds"]
    assert thresholds["KvferrySlowFirstTokensQueued"] == thresholds["KvferrySlowFirstTokensUnqueued"] == 8.192


@pytest.mark.parametrize("tier", [False, True])
def test_pods_reserve_what_is_planned_or_say_how_much_more(tier: bool) -> None:
    words = ["llama-3.1-70b", "--profile", "rag", "--gpu", "h200", "--users", "64", "--tp", "2", "--pp", "1"]
    if not tier:
        words += ["--volume-tier", "0", "--cpu-tier", "0"]
    shown = run(*words, "--emit", "values.yaml").stdout
    values, gpus = yaml.safe_load(shown), planned(*words)["layouts"][0]["gpus"]
    reserved = sum(
        -(-role["replicas"] // role["workersPerPod"]) * role["workersPerPod"] * role["gpusPerWorker"]
        for role in values["roles"].values()
    )
    assert (reserved > gpus) is tier
    assert (f"Pods reserve {reserved} GPUs, {reserved - gpus} more" in shown) is tier
    prefill = values["roles"]["prefill"]
    assert prefill["rdma"]
    assert prefill["env"]["UCX_TLS"] == "rc,cuda_copy,cuda_ipc,tcp"
    assert prefill["extraResources"] == {"rdma/ib": 2 * prefill["workersPerPod"]}
    assert "Without RDMA" in shown


LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(LLAMA_8B, 8_030_261_248, 8_030_261_248), (MIXTRAL, 46_702_792_704, 12_879_925_248)],
    ids=["llama", "mixtral"],
)
def test_parameters_of_a_folder_are_counted(config: dict[str, Any], total: int, active: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(str(tmp_path), "--gpu", "h200", "--tp", "2", "--pp", "1")
    assert (found["num_parameters"], found["num_active_parameters"]) == (total, active)


def test_parameters_that_cannot_be_counted_are_asked_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry_plan.commands import inputs

    monkeypatch.setattr(inputs, "count", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    said = refused(str(tmp_path))
    assert "give --parameters (such as 70.6e9), and --active-parameters" in said
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert "--active" not in refused(str(tmp_path))


def test_a_config_that_transformers_does_not_take_is_not_counted(tmp_path: Path) -> None:
    from kvferry_plan.commands.inputs import count
    from kvferry_plan.model_catalogue import geometry_of

    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    geometry = geometry_of(str(tmp_path))
    assert count({"model_type": "no-such"}, geometry) is None
    assert count(LLAMA_8B | {"hidden_size": "wide"}, geometry) is None


def test_nothing_that_does_says_what_would() -> None:
    words = ("llama-3.1-70b", "--users", "64", "--context", "32768", "--tpot", "0.05", "--ttft", "2")
    said = refused(*words, "--gpu", "h100", "--gpu", "h200", code=1).splitlines()
    assert "64 users, 2.32 requests/s of 32,256 + 512 tokens; TTFT 2 s, TPOT 50 ms" in said[0]
    nearest = [line for line in said if line.startswith("  nearest ")]
    assert len(nearest) == 1
    assert "h200 TP 8: TTFT of 2.02 s" in nearest[0]
    helping = [line for line in said if line.startswith("  would do ")]
    assert any("--ttft 2.2: " in line for line in helping)
    assert any("weights in fp8" in line and "GPUs" in line for line in helping)
    assert all("by vLLM alone" in line for line in helping if "KV pages in" in line)
    # What does is what was said.
    assert planned(*words[:-1], "2.2", "--gpu", "h100", "--gpu", "h200")["layouts"]


def test_a_miss_by_little_has_as_many_digits_as_show_it() -> None:
    from kvferry_plan.planner.sizing import above

    assert above(2.004, 2.0) == "2.004"
    assert above(2.02, 2.0) == "2.02"
    assert above(1.0000001, 1.0) == "1.0000001"
    assert above(3.19, 1.0) == "3.19"


def test_changes_to_what_kvferry_does_not_serve_say_so() -> None:
    shown = run("llama-3.1-8b", "--users", "64", "--gpu", "h100").stdout
    of_fp8, of_nvfp4 = (line for line in shown.splitlines() if "KV pages in" in line)
    assert "KV pages in fp8 instead" in of_fp8
    assert not of_fp8.endswith("by vLLM alone")
    assert "KV pages in nvfp4 instead" in of_nvfp4
    assert of_nvfp4.endswith("by vLLM alone")
    assert "users who ask again at once would send" in shown
    assert " of 45 " in shown  # capacity beside what is expected
    assert "no --ttft" in shown


def test_prices_are_of_all_gpus_or_of_one() -> None:
    words = ("llama-3.1-8b", "--gpu", "h100", "--gpu", "H200")
    found = planned(*words, "--price", "3", "--price", "H200=2.5")["layouts"]
    assert {each["gpu"]: each["price"]["usd_per_gpu_hour"] for each in found} == {"h100": 3.0, "h200": 2.5}
    kept = planned(*words, "--price", "h200=2.5")["layouts"]
    assert {each["gpu"]: each["price"]["kind"] for each in kept} == {"h100": "on-demand", "h200": "own"}
    assert "a second price for all GPUs" in refused(*words, "--price", "3", "--price", "4")
    assert "a second price for h100" in refused(*words, "--price", "h100=3", "--price", "h100=4")
    assert "no such GPU is planned; there are h100, h200" in refused(*words, "--price", "b200=3")
    for bad in ("h100=", "=", "nan", "0", "-1", "three"):
        assert "expected US dollars" in refused(*words, "--price", bad)


def test_gpus_that_a_budget_leaves_out_for_want_of_a_price_are_named() -> None:
    words = ("llama-3.1-8b", "--gpu", "h100", "--gpu", "h200")
    assert "left out   h200: no price known" in run(*words, "--budget", "100").stdout
    assert "left out" not in run(*words).stdout
    assert "left out" not in run(*words, "--budget", "100", "--price", "h200=3").stdout


def test_names_of_settings_are_whole_where_they_are_piped() -> None:
    from kvferry_plan.planner.engine_settings import COUNTERPARTS

    shown = run("--list", "settings").stdout
    assert all(name in shown for each in COUNTERPARTS for name in (each.kvferry, each.vllm, each.tensorrt_llm))


def test_the_catalogue_of_the_documentation_is_taken(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operator" / "plan-data.md").read_text()
    (text,) = (block for block in page.split("```yaml\n")[1:] if block.startswith("# gpus.yaml for --catalogue"))
    file = tmp_path / "gpus.yaml"
    file.write_text(text.partition("```")[0])
    words = ("llama-3.1-8b", "--catalogue", str(file), "--gpu", "h200", "--gpu", "own")
    found = {each["gpu"]: each["price"] for each in planned(*words)["layouts"]}
    assert found["h200"]["usd_per_gpu_hour"] == 3.1
    assert "own" in found


@pytest.mark.parametrize("profile", ["code", "agents"])
def test_a_profile_that_is_too_fast_for_a_model_names_the_ttft_that_is_not(profile: str) -> None:
    words = ("llama-3.1-70b", "--gpu", "h200", "--profile", profile, "--users", "16")
    said = refused(*words, code=1)
    (ttft,) = (line.split()[3].rstrip(":") for line in said.splitlines() if "would do  --ttft" in line)
    assert planned(*words, "--ttft", ttft)["layouts"]
