"""What pages for operators and deploy/ray/README.md tell to do: with keys, commands and objects that exist."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from kvferry import app, cli
from kvferry import config as configuration
from kvferry_plan import model_catalogue
from support.chart import helm_check, newest_helm, write_values

ROOT = helm_check.ROOT
OPERATOR = ROOT / "docs" / "operator"
# Those that install, change and look after a release; the others have commands of one machine.
CLUSTER_PAGES = [
    OPERATOR / f"{name}.md"
    for name in (
        *("kubernetes", "sizing", "hub-models", "gitops", "image", "monitoring", "scale-and-upgrade", "volumes"),
        *("etcd", "rotate-secrets", "usage", "troubleshooting"),
    )
]
PAGES = [*CLUSTER_PAGES, ROOT / "deploy" / "ray" / "README.md"]
VALUES = yaml.safe_load((helm_check.CHART / "values.yaml").read_text())
CONFIG = configuration.parse({}).model_dump(mode="json")
# What is called besides ours; each with the subcommands that are used.
OTHERS = {
    "helm": {"install", "test", "upgrade", "rollback", "lint", "template", "uninstall", "get"},
    "kubectl": {
        "get",
        "port-forward",
        "logs",
        "delete",
        "cordon",
        "drain",
        "exec",
        "apply",
        "label",
        "edit",
        "uncordon",
    },
    "serve": {"deploy"},
    "ray": {"job", "drain-node", "start"},
    "etcdctl": {"alarm", "compact", "defrag", "endpoint", "snapshot"},
    "etcdutl": {"snapshot"},
    "make": {"image", "test-image", "k8s-check"},
    "mmdebstrap": set(),
    "podman": {"push"},
    "install": set(),
    "curl": set(),
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", page.read_text())


def inline(page: Path) -> Iterator[str]:
    """Code within prose."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"; do |; done|\$\(", line):
                if part.strip() and not part.startswith("for "):
                    yield shlex.split(part.rstrip(")&; ").partition(" > ")[0], posix=False)
    for code in inline(page):
        if code.split()[0] in {*OTHERS, "kvferry", "python"} and " " in code:
            yield code.split()


def words(command: list[str]) -> list[str]:
    """Without options and what they take."""
    return [word for i, word in enumerate(command) if not word.startswith("-") and command[i - 1] not in ("-n", "-a")]


def test_every_command_exists() -> None:
    num_commands = 0
    for command in itertools.chain.from_iterable(map(commands, PAGES)):
        if re.fullmatch(r"[A-Z]+=.*", command[0]):
            continue
        num_commands += 1
        program, *rest = words(command)
        match program:
            case "kvferry":
                here: Any = cli.main
                while isinstance(here, click.Group) and rest:
                    found = here.get_command(click.Context(here), name := rest.pop(0))
                    assert found is not None, f"kvferry {name}: {command}"
                    here = found
                options = {option for parameter in here.params for option in parameter.opts}
                assert {word for word in command if word.startswith("--")} <= options, command
            case "python" if "-m" in command:
                module = command[command.index("-m") + 1]
                assert importlib.util.find_spec(module) is not None, module
            case "python":
                assert (ROOT / rest[0]).exists(), command
            case _:
                assert program in OTHERS, command
                known = OTHERS[program]
                assert not known or rest[0] in known or set(rest) & known, command
        for word in command:
            if word.startswith(("deploy/", "tools/")):
                assert (ROOT / word).exists(), word
    assert num_commands >= 50


def test_every_module_takes_the_options_that_are_shown() -> None:
    shown: dict[str, set[str]] = {}
    for page in PAGES:
        for command in commands(page):
            if "-m" in command and "kvferry.app" in command:
                after = command[command.index("kvferry.app") + 1 :]
                shown.setdefault(after[0], set()).update(word for word in after if word.startswith("--"))
    assert set(shown) == {"deploy", "delete"}
    for subcommand, options in shown.items():
        out = io.StringIO()
        before, sys.argv = sys.argv, ["app", subcommand, "--help"]
        try:
            with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
                app.main()
        finally:
            sys.argv = before
        assert all(option in out.getvalue() for option in options)


def test_every_key_that_is_named_exists() -> None:
    def exists(path: str, tree: Any) -> bool:
        for part in path.split("."):
            if not isinstance(tree, dict) or part not in tree:
                return False
            tree = tree[part]
        return True

    tops = {*VALUES, *CONFIG}
    keys = [
        match[0]
        for page in PAGES
        for code in inline(page)
        if not code.startswith(("/", "-", "http", "kubectl"))
        and " " not in code
        and (match := re.match(r"[a-zA-Z]+(?:\.[a-zA-Z_]+)+", code))
        and match[0].partition(".")[0] in tops
        and not match[0].endswith((".yaml", ".json"))
    ]
    assert len(keys) > 100
    unknown = [key for key in keys if not exists(key, VALUES) and not exists(key, CONFIG)]
    assert unknown == []


def test_the_values_that_are_shown_render(tmp_path: Path) -> None:
    shown = [block for page in PAGES for block in blocks(page, "yaml") if block.startswith("# values\n")]
    assert len(shown) >= 2
    for block in shown:
        values = yaml.safe_load(block)
        helm_check.parse_configs(newest_helm().documents(values=write_values(tmp_path, values)))


def gitops(tool: str) -> dict[str, Any]:
    (found,) = (block for block in blocks(OPERATOR / "gitops.md", "yaml") if block.startswith(f"# {tool}\n"))
    document: dict[str, Any] = yaml.safe_load(found)
    helm_check.validate(document)
    return document


def test_what_argo_cd_renders_is_the_same_each_time(tmp_path: Path) -> None:
    source = gitops("Argo CD")["spec"]["source"]
    assert ROOT / source["path"] == helm_check.CHART
    file = write_values(tmp_path, source["helm"]["valuesObject"])
    first, again = (newest_helm().documents(values=file) for _ in range(2))
    assert first == again
    for document in first:
        helm_check.validate(document)


def test_what_flux_installs_renders(tmp_path: Path) -> None:
    spec = gitops("Flux")["spec"]
    assert ROOT / spec["chart"]["spec"]["chart"] == helm_check.CHART
    for document in newest_helm().documents(values=write_values(tmp_path, spec["values"])):
        helm_check.validate(document)


def test_what_is_shown_fits_where_it_would_run() -> None:
    """Weights take 4 B a parameter of a CPU pod's memory, 2 B of a GPU; claims hold what they are for."""
    found = itertools.chain.from_iterable(blocks(page, "yaml") for page in CLUSTER_PAGES)
    shown = [yaml.safe_load(block) for block in found if block.startswith("# values\n")]
    shown += [gitops("Argo CD")["spec"]["source"]["helm"]["valuesObject"], gitops("Flux")["spec"]["values"]]
    checked = 0
    for values in shown:
        config = values.get("config", {})
        entry = model_catalogue.find(config.get("model", {}).get("path", VALUES["config"]["model"]["path"]))
        if entry is None:
            continue  # a folder, or a name that stands for one
        device = config.get("engine", {}).get("device", VALUES["config"]["engine"]["device"])
        for role in ("prefill", "decode"):
            pod = VALUES["roles"][role] | values.get("roles", {}).get(role, {})
            if device == "cpu":
                assert not pod["gpusPerWorker"]
                assert 4 * entry.num_parameters * pod["workersPerPod"] < (pod["memoryGiB"] - 4) * 2**30
            else:
                assert pod["gpusPerWorker"] == config["engine"].get("tensor_parallel_size", 1)
                # Of a GPU of 24 GB at least, and read through the pod's memory.
                assert 2 * entry.num_parameters < min(pod["gpusPerWorker"] * 22e9, pod["memoryGiB"] * 2**30)
        weights = VALUES["model"]["weights"] | values.get("model", {}).get("weights", {})
        if weights["enabled"]:
            checked += 1
            assert weights["claim"]["sizeGiB"] * 2**30 > 2 * entry.num_parameters + 2**30
        else:
            assert VALUES["model"]["cache"]["sizeGiB"] * 2**30 > 2 * entry.num_parameters + 5 * 2**30
    assert checked == 4


@pytest.mark.parametrize("tool", ["Argo CD", "Flux"])
def test_a_spoilt_gitops_object_is_seen(tool: str) -> None:
    document = gitops(tool)
    document["spec"]["intervall"] = "10m"
    with pytest.raises(helm_check.CheckFailed, match="intervall"):
        helm_check.validate(document)


def test_settings_on_command_lines_exist() -> None:
    for page in PAGES:
        for command in commands(page):
            for i, word in enumerate(command):
                if word == "--set":
                    key = command[i + 1].partition("=")[0]
                    tree: Any = VALUES if command[0] == "helm" else CONFIG
                    for part in key.split("."):
                        tree = tree[part]


def test_names_of_objects_are_those_of_the_chart() -> None:
    """Secrets, labels and objects of the release `kvferry` that pages speak of are rendered."""
    helm = newest_helm()
    scraped = "monitoring.members.enabled=true,networkPolicy.monitoringNamespace=monitoring"
    rendered = helm.documents("--set", f"fullnameOverride=kvferry,{scraped}")
    names = {each["metadata"]["name"] for each in rendered} | {"kvferry-etcd-0"}
    labels = set(re.findall(r"kvferry\.io/[a-z]+", helm_check.golden_text(rendered)))
    text = "\n".join(page.read_text() for page in CLUSTER_PAGES)
    spoken = set(re.findall(r"(?:secret|deployment/|service/|pod/)\s?(kvferry[a-z0-9-]*)", text))
    assert {"kvferry", "kvferry-gateway", "kvferry-etcd-0", "kvferry-etcd-tls"} <= spoken
    assert spoken <= names
    assert set(re.findall(r"kvferry\.io/[a-z]+", text)) <= labels
