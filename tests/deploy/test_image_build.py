"""The CPU image, built and started. Runs where it is asked for: `make test-image BASE=...`, as root with buildah."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.model_folder import cache_folder
from kvferry.util.addresses import free_port

ROOT = Path(__file__).resolve().parents[2]
MODEL = cache_folder() / "models" / "SmolLM2-135M-Instruct"
USER = "65532:65532"
ISOLATION = ("--isolation", os.environ.get("BUILDAH_ISOLATION", "chroot"))
# Inside: a cluster, one question over HTTP, what it wrote outside /tmp and its cache, and its end.
SERVE = """
    import json, os, subprocess, sys, urllib.request
    port = sys.argv[1]
    model = json.dumps({"model": "tiny", "max_tokens": 8, "temperature": 0,
        "messages": [{"role": "user", "content": "What does a ferry do?"}]}).encode()
    options = ["--no-ask", "--timeout", "300", "--model", "/model", "--set", "model.served_name=tiny"]
    try:
        subprocess.run(["kvferry", "up", *options, "--http-port", port, "--grpc-port", "0"], check=True)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", model,
            {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answer = json.load(response)
        print("ANSWER " + json.dumps([os.getuid(), answer["choices"][0]["message"]["content"], answer["usage"]]))
    finally:
        subprocess.run(["kvferry", "down"], check=True)
"""

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif("KVFERRY_TEST_IMAGE" not in os.environ, reason="builds an image: run `make test-image`"),
]


def buildah(*arguments: str, timeout_s: float = 900) -> str:
    done = subprocess.run(
        ["buildah", *arguments], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"buildah {arguments[0]} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image() -> str:
    """An image that is there ($KVFERRY_IMAGE), or one built from $BASE."""
    if shutil.which("buildah") is None:
        pytest.skip("buildah was not found")
    if os.geteuid() != 0:
        pytest.skip("chroot isolation needs root")
    if name := os.environ.get("KVFERRY_IMAGE"):
        return name
    if not (base := os.environ.get("BASE")):
        pytest.skip("BASE names no base image: an image's name, an OCI layout or an archive (docs/operator/image.md)")
    command = [sys.executable, "tools/build_image.py", "--engine", "cpu", "--base", base, "--builder", "buildah"]
    subprocess.run([*command, "--tag", "kvferry:test-cpu"], cwd=ROOT, check=True)
    return "kvferry:test-cpu"


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[str]:
    name = buildah("from", "--pull-never", image)
    try:
        yield name
    finally:
        buildah("rm", name)


def test_it_is_labelled_and_not_root(image: str) -> None:
    config = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items() if key.startswith("org.")}
    assert config["User"] == USER
    assert labels["title"] == "kvferry"
    assert labels["licenses"] == "Apache-2.0"
    assert len(labels["revision"].removesuffix("-dirty")) == 40
    assert labels["created"].endswith("Z")
    assert labels["version"]


def test_the_bill_of_materials_names_what_is_locked(container: str) -> None:
    bill = json.loads(buildah("run", *ISOLATION, container, "--", "cat", "/usr/share/kvferry/sbom.json"))
    purls = {component["purl"] for component in bill["components"] if "purl" in component}
    lines = (ROOT / "deploy/image/requirements-cpu.txt").read_text().splitlines()
    locked = {line.split(" ")[0] for line in lines if not line.startswith("#")}
    python = {f"{component['name'].lower()}=={component['version']}" for component in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX"
    assert {pin.replace("-", "_") for pin in locked} <= {each.replace("-", "_") for each in python}
    assert any(purl.startswith("pkg:deb/debian/libnuma1@") for purl in purls)


def test_it_holds_nothing_of_the_machine_that_built_it(container: str) -> None:
    folder = Path(buildah("mount", container))
    try:
        for path in ("build", "wheels", "root/.config", "root/.cache", "opt/build"):
            assert not (folder / path).exists(), path
        assert {each.name for each in (folder / "opt").iterdir()} == {"kvferry"}
        # Only the user's own folders are its to write.
        owned = subprocess.run(
            ["find", str(folder), "-xdev", "-user", "65532"], capture_output=True, text=True, check=True
        )
        assert {Path("/") / Path(line).relative_to(folder) for line in owned.stdout.splitlines()} == {
            Path("/var/cache/kvferry"),
            Path("/var/cache/kvferry/home"),
        }
    finally:
        buildah("umount", container)


def test_kvferry_up_serves_a_request_inside(image: str, tmp_path: Path) -> None:
    if not (MODEL / "config.json").is_file():
        pytest.skip(f"{MODEL} is missing: run make setup")
    script = tmp_path / "serve.py"
    script.write_text(textwrap.dedent(SERVE))
    script.chmod(0o644)
    tmp_path.chmod(0o755)
    name = buildah("from", "--pull-never", image)
    try:
        started_s = time.monotonic()
        output = buildah(
            *("run", *ISOLATION, "--user", USER),
            *("--volume", f"{MODEL}:/model:ro", "--volume", f"{script}:/serve.py:ro"),
            *(name, "--", "python3", "/serve.py", str(free_port("127.0.0.1"))),
        )
        elapsed_s = time.monotonic() - started_s
    finally:
        buildah("rm", name)
    (line,) = (line for line in output.splitlines() if line.startswith("ANSWER "))
    uid, text, usage = json.loads(line.removeprefix("ANSWER "))
    print(f"up, one answer and down in {elapsed_s:.0f} s: {text!r}")
    assert uid == int(USER.partition(":")[0])
    assert text.strip()
    assert usage["completion_tokens"] == 8


def test_the_version_is_the_packages(container: str) -> None:
    said = buildah("run", *ISOLATION, container, "--", "kvferry", "--version")
    pattern = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["path"]
    assert said.rpartition(" ")[2] in (ROOT / pattern).read_text()
