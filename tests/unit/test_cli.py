"""The command line: exit codes, messages, and what a configuration becomes of flags."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from kvferry import cli
from kvferry.cli import main
from kvferry.engine.base import CachedTokens, EngineOutput, PromptSources
from kvferry.gateway.generation import record_values
from kvferry.gateway.record_views import explained
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.router.request import RequestRecord, RequestState
from kvferry_local import cluster
from kvferry_local.child import StartFailed
from kvferry_local.commands import _print_explanation
from kvferry_plan.quality.command import print_report
from kvferry_plan.quality.report_file import write_report
from support.quality_reports import passing_report


@pytest.fixture(autouse=True)
def _own_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_RUN_DIR", "/tmp/kvf-test-cli-absent")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_flags_become_the_configuration() -> None:
    result = run(
        *(
            "config",
            "--engine",
            "sim",
            "--model",
            "/m: x",
            "--set",
            "decode.replicas=2",
            "--etcd",
            "a:1",
            "--etcd",
            "b:2",
        ),
        *("--http-port", "8123", "--grpc-port", "0", "--insecure", "--set", "gateway.host=0.0.0.0"),
    )
    assert result.exit_code == 0, result.output
    config = yaml.safe_load(result.output)
    assert config["engine"]["kind"] == "sim"
    assert config["model"]["path"] == "/m: x"
    assert config["decode"]["replicas"] == 2
    assert config["membership"]["endpoints"] == ["a:1", "b:2"]
    assert config["gateway"]["http_port"] == 8123
    assert config["gateway"]["grpc_port"] == 0
    assert config["gateway"]["host"] == "0.0.0.0"


def test_the_command_line_of_an_entry_is_asked_for_by_its_name() -> None:
    models = ("--engine", "sim", "--set", "models=[{name: a}, {name: b}]")
    shown = yaml.safe_load(run("config", *models).output)
    assert [entry["name"] for entry in shown["models"]] == ["a", "b"]
    unknown = run("config", *models, "--vllm", "decode", "--entry", "c")
    assert (unknown.exit_code, unknown.output.count("Traceback")) == (2, 0)
    assert "--entry 'c': the entries of `models` are: a, b" in unknown.output
    alone = run("config", *models, "--entry", "a")
    assert alone.exit_code == 2
    assert "--entry needs --vllm prefill or --vllm decode" in alone.output
    no_default = ("--set", "prefill.replicas=0", "--set", "decode.replicas=0", "--vllm", "decode")
    unnamed = run("config", *models, *no_default)
    assert unnamed.exit_code == 2
    assert "this cluster has no default model; choose one with --entry: a, b" in unnamed.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("config", "--set", "gateway.http_prot=1"), "did you mean 'http_port'?"),
        (("up", "--http-port", "99999"), "gateway.http_port"),
        (("up", "--grpc-port", "99999"), "gateway.grpc_port"),
        (("up", "--http-port", "9000"), "http_port and grpc_port are both 9000"),
        (("up", "--config", "/absent.yaml"), "/absent.yaml: No such file"),
        (("up", "--set", "gateway.host=0.0.0.0"), "--insecure"),
        (("down", "--name", "No Spaces"), "name"),
    ],
)
def test_a_bad_configuration_is_one_message_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("kvferry: ")
    assert said in result.stderr
    assert result.stdout == ""


def test_secrets_that_others_may_read_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_nothing(*_: object) -> None:
        raise StartFailed("etcd")

    monkeypatch.setattr(cluster, "start_etcd", start_nothing)
    file = tmp_path / "keys.json"
    file.write_text('{"*": "%s"}' % ("ab" * 32))
    arguments = ("up", "--engine", "sim", "--http-port", "0", "--set", f"tier.encryption_keys_file={file}")
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:  # short, for the sockets in it
        monkeypatch.setenv("KVFERRY_RUN_DIR", folder)
        for mode, exit_code, said in ((0o644, 2, f"{file}: "), (0o640, 2, "chmod 600"), (0o600, 1, "etcd")):
            file.chmod(mode)
            result = run(*arguments)
            assert (result.exit_code, said in result.stderr) == (exit_code, True), result.output


def test_a_key_is_printed_once_and_its_hash_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    result = run("key", "new", "--tenant", "acme", "--name", "ci", "--file", str(file))
    assert result.exit_code == 0, result.output
    key = result.stdout.strip()
    assert key.startswith("kvf_")
    assert key not in file.read_text()
    # The configured file is the default.
    monkeypatch.setenv("KVFERRY__GATEWAY__KEYS_FILE", str(file))
    assert run("key", "new", "--tenant", "beta", "--name", "ci").exit_code == 0
    assert [entry["tenant"] for entry in yaml.safe_load(file.read_text())] == ["acme", "beta"]
    again = run("key", "new", "--tenant", "beta", "--name", "ci")
    assert again.exit_code == 2
    assert "already" in again.stderr
    assert "kvf_" not in again.output


def test_a_key_needs_a_file_and_one_that_can_be_written(tmp_path: Path) -> None:
    nowhere = run("key", "new", "--tenant", "acme", "--name", "ci")
    assert nowhere.exit_code == 2
    assert "--file" in nowhere.stderr
    absent = run("key", "new", "--tenant", "acme", "--name", "ci", "--file", str(tmp_path / "absent" / "keys.yaml"))
    assert absent.exit_code == 2
    assert "absent" in absent.stderr


def test_status_of_nothing_is_exit_code_1() -> None:
    result = run("status")
    assert result.exit_code == 1
    assert "no cluster runs here" in result.stderr


def test_down_with_nothing_to_end_is_fine() -> None:
    result = run("down")
    assert result.exit_code == 0
    assert result.stdout == "nothing was running\n"


def test_the_version_is_told() -> None:
    assert "kvferry, version" in run("--version").output


def test_the_explanation_tells_volumes_from_transfers(capsys: pytest.CaptureFixture[str]) -> None:
    record = RequestRecord()
    decode = Member(
        kind=MemberKind.DECODE, member_id=MemberId("d"), address="h:1", model="m", version="1", block_size=16
    )
    last = EngineOutput([], "", cached=CachedTokens(device=8, cpu=3, volume=64, kv_transfer=20))
    record.note_sources(PromptSources(5, 8, 87), last, decode)
    _print_explanation(Console(width=200), {"request_id": "chatcmpl-1", "choices": [], **record_values(record)})
    said = capsys.readouterr().out
    assert (
        "5 were computed by the decode worker, 8 cached in its engine, 20 by a KV transfer, 3 from its CPU tier" in said
    )
    assert "64 from volumes, 2 pages ferried" in said


def test_the_explanation_shows_what_a_gateway_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """The printer and the gateway agree on the names of a request's record."""
    recorded = {"request_id": "chatcmpl-1", "choices": [], **record_values(RequestRecord())}
    _print_explanation(Console(width=200), {**recorded, "error_code": "request_quarantined"})
    said = capsys.readouterr().out
    assert "0 pages ferried" in said
    assert "0 by a KV transfer, from its CPU tier or from a volume" in said
    assert "ended with an error: request_quarantined" in said
    assert "now" not in said, "what an earlier gateway does not say"


@pytest.mark.parametrize(("state", "words"), [(RequestState.DECODING, "decoding now"), (RequestState.ENDED, "")])
def test_the_explanation_of_a_request_that_goes_on_says_where_it_is(
    capsys: pytest.CaptureFixture[str], state: RequestState, words: str
) -> None:
    _print_explanation(Console(width=200), explained(RequestRecord(state=state)))
    said = capsys.readouterr().out
    assert words in said
    assert words or "now" not in said


def test_a_quality_report_is_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_nothing(*_: object) -> None:
        raise StartFailed("etcd")

    monkeypatch.setattr(cluster, "start_etcd", start_nothing)
    file = tmp_path / "report.json"
    settings = ("--set", f"engine.quality_report={file}", "--set", "model.dtype=bfloat16", "--set", "model.revision=r")
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:  # short, for the sockets in it
        monkeypatch.setenv("KVFERRY_RUN_DIR", folder)

        def ends(*words: str, code: int, said: str) -> None:
            result = run(*words, *settings)
            assert (result.exit_code, said in result.stderr) == (code, True), result.output

        up = ("up", "--http-port", "0")
        for words in (("config",), up):
            ends(*words, code=2, said=f"engine.quality_report: {file} cannot be read: No such file")
        write_report(passing_report(verdict="undecided"), file)
        for words in (("config",), up):
            ends(*words, code=2, said=f"engine.quality_report {file}: its verdict is 'undecided'")
        write_report(passing_report(), file)
        ends("config", code=0, said="")
        # Only `up` has the model: its longest context, and its weights.
        ends(*up, code=2, said="its longest context has 1,088 tokens; the engine's has 8,192")
        ends(*up, "--set", "model.max_model_len=1088", code=2, said="it is of weights 'w'")
        # Without engines that compute, nothing is measured.
        ends(*up, "--engine", "sim", code=1, said="etcd")


def test_an_undecided_report_says_what_is_allowed_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(passing_report())
    shown = capsys.readouterr().out
    assert "budget 0.50%, that is 4.99 mnats" in shown
    assert "undecided at" not in shown
    passed = passing_report()
    length = msgspec.structs.replace(passed.lengths[0], verdict="undecided")
    print_report(msgspec.structs.replace(passed, verdict="undecided", lengths=(length,)))
    assert "undecided at 1,024 tokens" in (shown := capsys.readouterr().out)
    assert "take more --samples than 4 (at most 64)" in shown


@pytest.mark.parametrize(
    ("command", "package"),
    [("plan", "kvferry-plan"), ("up", "kvferry-local"), ("tier", "kvferry-keeper"), ("tenant", "kvferry-tenants")],
)
def test_a_command_of_a_package_that_is_not_installed_says_which(
    monkeypatch: pytest.MonkeyPatch, command: str, package: str
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda **_: ())
    result = run(command, "llama-3.1-8b", "--gpu", "h100")
    assert result.exit_code == 2
    assert result.stderr == f"kvferry: {command} is a command of the package {package}: pip install {package}\n"
    assert f"Not installed: pip install {package}" in run("--help").output
