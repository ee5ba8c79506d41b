"""The command line: exit codes, messages, and what a configuration becomes of flags."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner, Result

from kvferry.cli import main


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
        *("--http-port", "8123", "--insecure", "--set", "gateway.host=0.0.0.0"),
    )
    assert result.exit_code == 0, result.output
    config = yaml.safe_load(result.output)
    assert config["engine"]["kind"] == "sim"
    assert config["model"]["path"] == "/m: x"
    assert config["decode"]["replicas"] == 2
    assert config["membership"]["endpoints"] == ["a:1", "b:2"]
    assert config["gateway"]["http_port"] == 8123
    assert config["gateway"]["host"] == "0.0.0.0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("config", "--set", "gateway.http_prot=1"), "did you mean 'http_port'?"),
        (("up", "--http-port", "99999"), "gateway.http_port"),
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
