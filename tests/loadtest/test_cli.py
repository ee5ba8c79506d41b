"""The command line: whole runs against a fake server, and every kind of bad input on one line with exit code 2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvferry_loadtest.cli import LATE, main
from kvferry_loadtest.result import read_result
from kvferry_loadtest.selfcheck import fake_server

QUICK = ("-s", "chat.think_time_s=0.01", "-s", "arrivals.rate_per_s=50")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server("--ttft-ms", "5", "--itl-ms", "1") as url:
        yield url


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def refused(*arguments: str | Path) -> str:
    """The one line that bad input gets."""
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvferry-loadtest: ")
    return line.removeprefix("kvferry-loadtest: ")


def test_a_run_writes_results_records_and_a_report(url: str, tmp_path: Path) -> None:
    done = invoke(
        "run", "smoke", "--url", url, "--name", "fake one", "--repeats", "2", "--records", "--out", tmp_path, *QUICK
    )
    # On a busy machine the harness may rightly say that it was late; everything is written all the same.
    assert done.exit_code in (0, LATE), done.output
    results = [read_result(tmp_path / f"fake-one-smoke-{repeat}.json") for repeat in range(2)]
    assert [result.seed for result in results] == [1, 2]
    for repeat, result in enumerate(results):
        assert (result.deployment, result.repeat, result.loop) == ("fake one", repeat, "open")
        assert result.target == {"url": url, "model": "fake"}
        counts = result.overall.counts
        assert (counts.planned, counts.ok) == (8, 8)  # 4 sessions of 2 turns; the warm-up is left out
        assert result.overall.latencies["ttft_sent"].p50 >= 3  # 5 by a clock of whole milliseconds that lags behind
        assert result.overall.goodput_share == 1.0
        assert result.floor is not None
        assert 0 < result.floor.recompute_share < 1
        assert result.server.dialect == ""  # a fake server has no metrics, and none are made up
        assert result.server.recompute_share is None
        lines = (tmp_path / f"fake-one-smoke-{repeat}.records.jsonl").read_text()
        records = [json.loads(line) for line in lines.splitlines()]
        assert len(records) == 10
        assert sum(record["warmup"] for record in records) == 2
    assert "report: " in done.output
    html = next(tmp_path.glob("*.html")).read_text()
    assert "fake one" in html


def test_the_same_seed_sends_the_same(tmp_path: Path) -> None:
    plans = [json.loads(invoke("plan", "rag-chat", "--seed", "5").stdout) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0]["seed"] == 5
    assert plans[0]["requests"] == 2400


def test_scenarios_are_listed() -> None:
    lines = invoke("scenarios").stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {
        "rag-chat", "chat", "agent", "long-prompt", "batch-summarise", "sibling-burst", "noisy-neighbour", "trace"
    }  # fmt: skip


def test_results_are_compared(url: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        for repeat in ("0", "1"):
            out = tmp_path / name / repeat
            invoke("run", "smoke", "--url", url, "--name", name, "--no-report", "--out", out, *QUICK)
    files = sorted(tmp_path.glob("*/*/*.json"))
    assert len(files) == 4
    shown = invoke("compare", *files)
    assert shown.exit_code == 0, shown.output
    assert "TTFT" in shown.output
    as_json = json.loads(invoke("compare", "--json", *files).stdout)
    assert as_json
    assert invoke("report", *files, "--out", tmp_path / "report").exit_code == 0
    assert list((tmp_path / "report").glob("*.html"))


def test_an_endpoint_that_is_not_there() -> None:
    assert refused("run", "smoke", "--url", "http://127.0.0.1:1") == "http://127.0.0.1:1: connection refused"


def test_what_is_no_url() -> None:
    assert refused("run", "smoke", "--url", "ftp://h") == "ftp://h: not a URL like http://HOST:PORT"


def test_a_key_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret-of-mine")
    with fake_server("--api-key", "another") as url:
        line = refused("run", "smoke", "--url", url, "--api-key-env", "THE_KEY")
        assert line == f"{url}: refuses the key in $THE_KEY: 401: this key is not known"
        line = refused("run", "smoke", "--url", url)
        assert line == f"{url}: refuses requests without a key (--api-key-env): 401: this key is not known"


def test_a_key_that_is_not_set(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THE_KEY", raising=False)
    line = refused("run", "smoke", "--url", url, "--api-key-env", "THE_KEY")
    assert line == "the key of the target is read from $THE_KEY, which is not set"


def test_a_model_that_is_not_served(url: str) -> None:
    assert refused("run", "smoke", "--url", url, "--model", "m") == f"{url}: does not serve 'm', but fake"


def test_servers_that_are_not_alike(url: str) -> None:
    with fake_server("--model", "another") as other:
        assert refused("run", "smoke", "--url", url, "--url", other) == f"{other}: does not serve 'fake', but another"


def test_a_scenario_that_is_not_there() -> None:
    assert refused("plan", "rag").startswith("no scenario 'rag'; there are agent, batch-summarise, ")


def test_a_key_that_no_scenario_has(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('description = "x"\nkind = "chat"\nloop = "open"\nthink = 1\n')
    line = refused("plan", file)
    assert line.startswith(f"{file}: think = 1: unknown key; there are ")


def test_a_broken_trace_line(url: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}\n'
        '{"timestamp":5,"input_length":"512","output_length":1,"hash_ids":[1]}\n'
    )
    line = refused("run", "trace", "--url", url, "-s", f"trace.path={file}")
    assert line.startswith(f"{file}: line 2: input_length: must be a whole number")


@pytest.mark.parametrize("override", ["nothing", "=3"])
def test_settings_that_are_none(override: str) -> None:
    assert refused("plan", "chat", "-s", override) == f"--set {override}: it must be KEY=VALUE"


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert refused("report", tmp_path / "a.json").startswith(f"{tmp_path / 'a.json'}: not a result of this version")
    assert refused("report", tmp_path / "b.json") == f"{tmp_path / 'b.json'}: No such file or directory"
