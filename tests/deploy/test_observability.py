"""Alerts and dashboards: every expression parses, and names only metrics and labels that are exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from kvferry.observability.telemetry import CATALOGUE, IDENTITY, Kind
from support.chart import helm_check, newest_helm, one, write_values
from support.waiting import PATIENCE_S

ALERTS = yaml.safe_load((helm_check.CHART / "files" / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((helm_check.CHART / "files" / "dashboards" / "kvferry.json").read_text())
# That Prometheus adds to every series it scrapes.
TARGET_LABELS = {"namespace", "job", "instance", "pod"}


def series() -> dict[str, set[str]]:
    """Name of each series that is exported -> its labels."""
    found = {}
    for metric in CATALOGUE:
        labels = {label.name for label in (*metric.labels, *IDENTITY[metric.exporter])} | TARGET_LABELS
        if metric.kind in (Kind.HISTOGRAM, Kind.SUMMARY):
            found |= {f"{metric.name}_sum": labels, f"{metric.name}_count": labels}
            if metric.kind is Kind.HISTOGRAM:
                found[f"{metric.name}_bucket"] = labels | {"le"}
        else:
            found[metric.name] = labels
    return found


SERIES = series()


def nodes(expression: Any) -> Iterator[Any]:
    """An expression and all expressions in it."""
    yield expression
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        below = getattr(expression, name, None)
        if below is not None and not isinstance(below, str | float | int):
            yield from nodes(below)
    for below in getattr(expression, "args", None) or ():
        yield from nodes(below)


def faults(text: str) -> list[str]:
    """What of a PromQL expression is not exported. Raises ValueError where it does not parse."""
    found = []
    available: set[str] = set()
    everything = list(nodes(promql_parser.parse(text)))
    selectors = [node for node in everything if isinstance(node, promql_parser.VectorSelector)]
    for selector in selectors:
        if selector.name not in SERIES:
            found.append(f"no metric {selector.name}")
            continue
        available |= SERIES[selector.name]
        found += [
            f"{selector.name} has no label {matcher.name}"
            for matcher in selector.matchers.matchers
            if matcher.name not in SERIES[selector.name]
        ]
    for labels in re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", text):
        found += [f"no label {each}" for each in re.findall(r"\w+", labels) if each not in available]
    if not selectors:
        found.append("no metric at all")
    return found


def expression(rule: dict[str, Any], selector: str = "") -> str:
    text: str = rule["expr"]
    return text.replace("THRESHOLD", str(rule["threshold"])).replace("SELECTOR", selector)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
@pytest.mark.parametrize("selector", ["", 'namespace="serving"'])
def test_an_alert_uses_metrics_that_are_exported(rule: dict[str, Any], selector: str) -> None:
    assert faults(expression(rule, selector)) == []
    assert rule["expr"].count("THRESHOLD") == 1
    num_selectors = sum(
        isinstance(node, promql_parser.VectorSelector) for node in nodes(promql_parser.parse(expression(rule)))
    )
    assert rule["expr"].count("SELECTOR") == num_selectors
    labels = set(re.findall(r"\$labels\.(\w+)", rule["summary"]))
    assert labels <= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
    assert rule["unit"]
    assert rule["severity"] in ("warning", "critical")


def test_codes_of_refusals_are_codes_that_there_are() -> None:
    (refused,) = (metric for metric in CATALOGUE if metric.name == "kvferry_requests_refused_total")
    (code,) = refused.labels
    (rule,) = (rule for rule in RULES if rule["alert"] == "KvferryGatewayRefusing")
    (named,) = re.findall(r'code=~"([^"]*)"', rule["expr"])
    assert set(named.split("|")) <= set(code.values)


@pytest.mark.parametrize(
    "text",
    [
        "kvferry_no_such_metric > 1",
        "sum by (nothing) (kvferry_ready)",
        'kvferry_ready{nothing="x"}',
        "rate(kvferry_time_to_first_token_seconds[5m])",
        "1 + 1",
        "max(kvferry_ready) and on () (min(kvferry_ready) or max(kvferry_nothing))",
    ],
)
def test_an_expression_that_names_something_else_is_seen(text: str) -> None:
    assert faults(text)


def test_an_expression_that_does_not_parse_is_seen() -> None:
    with pytest.raises(ValueError):
        faults("sum(kvferry_ready")


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_a_panel_shows_metrics_that_are_exported(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        text = target["expr"].replace("$__rate_interval", "5m")
        assert faults(text) == []
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", text))))


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def dashboards_uid(documents: list[dict[str, Any]]) -> str:
    (dashboards,) = (each for each in documents if each["metadata"]["name"].endswith("-dashboards"))
    uid: str = json.loads(dashboards["data"]["kvferry.json"])["uid"]
    return uid


def test_a_dashboard_has_a_uid_of_its_release(tmp_path: Path) -> None:
    """With one of all, Grafana would show the dashboard of the release that its sidecar wrote last."""

    def uid(name: str, namespace: str = helm_check.NAMESPACE) -> str:
        values = {"fullnameOverride": name, "monitoring": {"dashboards": {"enabled": True}}}
        return dashboards_uid(newest_helm().documents("--namespace", namespace, values=write_values(tmp_path, values)))

    uids = [uid("a"), uid("b"), uid("a", "other")]
    assert uid("a") == uids[0]
    assert len(set(uids)) == 3
    # Grafana takes at most 40 characters of these.
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", each) for each in uids)


def test_the_rendered_rules_are_those_of_the_data(tmp_path: Path) -> None:
    alerts = {"enabled": True, "thresholds": {"KvferryKvPagesScarce": 0.5}, "without": ["KvferryWorkerUnpaired"]}
    values = {"monitoring": {"alerts": alerts, "dashboards": {"enabled": True}}}
    documents = newest_helm().documents(values=write_values(tmp_path, values))
    rendered = one(documents, "PrometheusRule")
    helm_check.validate(rendered)
    rules = [rule for group in rendered["spec"]["groups"] for rule in group["rules"]]
    wanted = [
        expression(rule | ({"threshold": 0.5} if rule["alert"] == "KvferryKvPagesScarce" else {}))
        for rule in RULES
        if rule["alert"] != "KvferryWorkerUnpaired"
    ]
    assert [rule["expr"] for rule in rules] == wanted
    assert {rule["alert"] for rule in rules} == {rule["alert"] for rule in RULES} - {"KvferryWorkerUnpaired"}
    dashboards = one(documents, "ConfigMap", "trial-dashboards")
    own = {"uid": dashboards_uid(documents), "title": f"kvferry {helm_check.NAMESPACE}/trial"}
    assert json.loads(dashboards["data"]["kvferry.json"]) == DASHBOARD | own
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_prometheus_itself_accepts_the_rules(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    values = {"monitoring": {"alerts": {"enabled": True, "selector": 'namespace="serving"'}}}
    rendered = one(newest_helm().documents(values=write_values(tmp_path, values)), "PrometheusRule")
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rendered["spec"]))
    checked = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(RULES)} rules found" in checked.stdout


def load(*, is_bad: bool, queued: int) -> list[dict[str, str]]:
    """Series of 25 hours, a sample a minute; bad or not in the last of them."""
    num_minutes, num_bad = 1440, 60

    def gauge(good: float, bad: float) -> str:
        return f"{good}x{num_minutes} {bad if is_bad else good}x{num_bad}"

    def counter(good: float, bad: float) -> str:
        reached = good * num_minutes
        rate = bad if is_bad else good
        return f"0+{good}x{num_minutes} {reached + rate}+{rate}x{num_bad}"

    worker, volume = 'worker="w",role="decode"', 'volume="v",keeper="k"'
    return [
        {"series": series, "values": values}
        for series, values in {
            "kvferry_ready": gauge(1, 0),
            'kvferry_model_ready{model="default"}': gauge(1, 0),
            f"kvferry_worker_kv_pages{{{worker}}}": gauge(100, 100),
            f"kvferry_worker_kv_pages_used{{{worker}}}": gauge(50, 99),
            f"kvferry_worker_unpaired{{{worker}}}": gauge(0, 1),
            f"kvferry_worker_requests_waiting{{{worker}}}": gauge(0, 0),
            "kvferry_queued_requests": gauge(0, queued),
            f"kvferry_volume_readable{{{volume}}}": gauge(1, 0),
            f"kvferry_volume_writable{{{volume}}}": gauge(1, 0),
            'kvferry_requests_total{endpoint="chat",status="200"}': counter(60, 60),
            'kvferry_requests_refused_total{code="overloaded"}': counter(0, 30),
            "kvferry_preempted_requests_total": counter(0, 6),
            'kvferry_quarantined_requests_total{when="first"}': counter(0, 1),
            f'kvferry_worker_prompt_tokens_total{{{worker},source="computed"}}': counter(1000, 1000),
            f'kvferry_worker_cached_prompt_tokens_total{{{worker},tier="gpu"}}': counter(500, 10),
            'kvferry_time_to_first_token_seconds_bucket{le="0.25"}': counter(60, 0),
            'kvferry_time_to_first_token_seconds_bucket{le="8"}': counter(60, 60),
            'kvferry_time_to_first_token_seconds_bucket{le="+Inf"}': counter(60, 60),
        }.items()
    ]


@pytest.mark.parametrize(
    ("is_bad", "queued", "silent"),
    [
        (False, 0, {rule["alert"] for rule in RULES}),
        (True, 5, {"KvferrySlowFirstTokensUnqueued"}),
        (True, 0, {"KvferrySlowFirstTokensQueued"}),
    ],
)
def test_alerts_fire_when_they_should_and_not_before(
    tmp_path: Path, is_bad: bool, queued: int, silent: set[str]
) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    values = {"monitoring": {"alerts": {"enabled": True}}}
    rendered = one(newest_helm().documents(values=write_values(tmp_path, values)), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rendered["spec"]))
    firing = sorted({rule["alert"] for rule in RULES} - silent)
    expected = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "1500m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
    }
    case = {"interval": "1m", "input_series": load(is_bad=is_bad, queued=queued), "promql_expr_test": [expected]}
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(whole))
    checked = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_gateways_that_are_all_away_are_noticed(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    values = {"monitoring": {"alerts": {"enabled": True, "selector": 'namespace="serving"'}}}
    rendered = one(newest_helm().documents(values=write_values(tmp_path, values)), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rendered["spec"]))
    case = {
        "interval": "1m",
        # One gateway is up for five minutes; then its series ends.
        "input_series": [{"series": 'kvferry_ready{namespace="serving"}', "values": "1x5 _x30"}],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "30m",
                "exp_samples": [{"labels": '{alertname="KvferryNoGatewayReady"}', "value": 1}],
            }
        ],
    }
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(whole))
    checked = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
