"""Profiles and rules name their sources, and the chart's examples agree with their profiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.errors import ConfigError
from kvferry.observability import telemetry
from kvferry_plan.planner import engine_settings, plan, published, rules
from kvferry_plan.planner.profiles import PROFILES, Profile, find
from support.plan_questions import question

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "kvferry"
EXAMPLES = CHART / "examples"
ALERTS = [
    rule for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
IDS = {figure.id for figure in published.load().figures}


def example(profile: Profile) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{profile.example}.yaml").read_text())
    return content


def test_the_six_workloads_are_there() -> None:
    assert [profile.name for profile in PROFILES] == ["chat", "code", "rag", "batch", "agents", "multi-tenant"]
    with pytest.raises(ConfigError, match="expected one of chat, code"):
        find("chats")


@pytest.mark.parametrize("profile", PROFILES, ids=lambda each: each.name)
def test_a_profile_is_planned_and_gives_reasons(profile: Profile) -> None:
    asked = question(
        "llama-3.1-8b", gpus=("h100", "h200"), context=profile.context_tokens, prompt=profile.prompt,
        output=profile.output, users=64, ttft_s=profile.ttft_s, tpot_s=profile.tpot_s,
        prefix_share=profile.prefix_share, mode=profile.mode, max_num_batched_tokens=profile.max_num_batched_tokens,
    )  # fmt: skip
    assert plan.make(asked).candidates
    explained = " ".join(reason.setting for reason in profile.reasons)
    assert "kv_cache_dtype" in explained
    assert "ttl" in explained
    assert {reason.source for reason in profile.reasons if reason.source} <= IDS
    # Where offload is barred, no tier is planned, and no time to live of one.
    if not profile.offload:
        assert profile.cpu_tier_gib == profile.volume_tier_gib == 0
        assert set(profile.ttl_s) == {"device"}
    assert all(limit > 0 for limit, _ in profile.kv_cache_dtypes)


def test_the_dtype_depends_on_the_context() -> None:
    assert find("rag").kv_cache_dtype(65_536) == "fp8"
    assert find("rag").kv_cache_dtype(65_537) == "auto"
    assert find("chat").kv_cache_dtype(100) == "auto"


@pytest.mark.parametrize("profile", [each for each in PROFILES if each.example], ids=lambda each: each.name)
def test_an_example_of_the_chart_agrees_with_its_profile(profile: Profile) -> None:
    values = example(profile)
    first_lines = (EXAMPLES / f"{profile.example}.yaml").read_text()[:900]
    assert f"`kvferry plan --profile {profile.name}`" in first_lines
    config, roles = values["config"], values["roles"]
    assert config["model"]["max_model_len"] >= min(profile.context_tokens, 32_768)
    if profile.mode == "disaggregated":
        assert not values.get("aggregated")
        assert roles["prefill"]["replicas"] >= 1
        assert roles["prefill"]["engine"]["max_num_batched_tokens"] == profile.max_num_batched_tokens
    tier = values.get("tier", {})
    assert bool(tier.get("enabled")) is profile.offload
    if profile.offload:
        per_pod = roles["decode"].get("workersPerPod", 1)
        assert tier["cpuGiB"] * per_pod <= max(profile.cpu_tier_gib, 1)
        assert 0 < sum(volume["capacityGiB"] for volume in tier["volumes"]) <= profile.volume_tier_gib
    # vLLM with quantized KV pages is not served, whatever a profile wants.
    assert config["engine"].get("kv_cache_dtype", "auto") == "auto"


def test_rules_name_sources_and_metrics_that_exist() -> None:
    names = [rule.name for rule in rules.RULES]
    assert len(set(names)) == len(names)
    assert {rule.source for rule in rules.RULES} <= IDS
    own = {metric.name for metric in telemetry.CATALOGUE}
    for rule in rules.RULES:
        for metric in re.findall(r"kvferry_[a-z_]+", rule.query + rule.look):
            assert re.sub(r"_(bucket|sum|count)$", "", metric) in own, metric
        assert rule.symptom
        assert rule.cause
        assert rule.look
        assert rule.action
        assert rule.disrupts
        # What kvferry refuses is no advice.
        assert "FP8 KV" not in rule.action


def test_thresholds_are_those_of_the_conditions_and_sources() -> None:
    by_name = {rule.name: rule for rule in rules.RULES}
    for name, published_id, scale in (
        ("kv-use-high", "002.mon.usage.high", 100),
        ("kv-thrashing", "002.mon.usage.thrash", 100),
        ("preemptions", "002.mon.preempt", 100),
        ("ttft-slow", "000.slo.ttft", 1000),
    ):
        (figure,) = (each for each in published.load().figures if each.id == published_id)
        rule = by_name[name]
        assert rule.threshold is not None
        assert rule.threshold * scale == pytest.approx(figure.value)
        alerts = [each for each in ALERTS if each.get("rule") == name]
        assert all(each["threshold"] == rule.threshold for each in alerts)
        # Where nothing watches it, a query says so.
        assert bool(alerts) is not bool(rule.query)
        assert alerts or f"> {rule.threshold:g}" in rule.query
        assert rule.source == published_id
    assert by_name["hit-rate-collapse"].threshold == rules.HIT_RATE_DROP


def test_the_alerts_of_the_documentation_are_the_charts() -> None:
    page = (ROOT / "docs" / "operator" / "headroom.md").read_text()
    table = page.partition("## Alerts")[2].partition("## ")[0]
    shown = [[cell.strip() for cell in line.split(" | ")] for line in table.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in shown] == [each["alert"] for each in ALERTS]
    for row, alert in zip(shown, ALERTS, strict=True):
        assert row[1].strip("`") == alert.get("rule", "–")
        assert row[3] == alert["for"]
        assert row[4].partition(",")[0] == f"{alert['threshold']:g}"
        assert re.findall(r"kvferry_\w+", row[5]) == re.findall(r"kvferry_\w+", alert["expr"])
    # No other alert is named: thresholds of one that is not there are refused.
    assert set(re.findall(r"`(Kvferry\w+)`", page)) == {each["alert"] for each in ALERTS}
    assert {each["rule"] for each in ALERTS if "rule" in each} <= {rule.name for rule in rules.RULES}


def test_plans_and_rules_share_the_limit_of_kv_pages() -> None:
    from kvferry_plan.planner.assumptions import DEFAULTS

    assert DEFAULTS.kv_limit == rules.KV_USE_HIGH
    assert [rule.name for rule in rules.at_risk(0.9)] == ["kv-use-high"]
    assert [rule.name for rule in rules.at_risk(0.97)] == ["kv-use-high", "kv-thrashing"]
    assert rules.at_risk(0.5) == ()


def test_settings_of_engines_say_where_there_is_no_counterpart() -> None:
    assert all(each.meaning and each.vllm + each.kvferry for each in engine_settings.COUNTERPARTS)
    for engine in ("sglang", "tensorrt_llm", "llama_cpp"):
        missing = [each for each in engine_settings.COUNTERPARTS if not getattr(each, engine)]
        present = [each for each in engine_settings.COUNTERPARTS if getattr(each, engine)]
        assert present
        assert missing or engine == "sglang"
    with pytest.raises(ConfigError, match="no published setting"):
        engine_settings.find("vLLM", "--swap")


def test_kvferrys_settings_are_keys_of_its_configuration() -> None:
    from kvferry.config import ClusterConfig

    for each in engine_settings.COUNTERPARTS:
        for key in filter(None, each.kvferry.split(", ")):
            section, _, field = key.partition(".")
            kind = ClusterConfig.model_fields[section].annotation
            assert kind is not None
            assert field in kind.model_fields, key
