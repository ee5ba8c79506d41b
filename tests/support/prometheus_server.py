"""A real Prometheus for tests, scraping what its configuration says.

The program is one on PATH, or Debian's package: no wheel has it. The package is fetched by apt-get, which needs no
privileges for that, and unpacked into the cache folder, once per machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvferry.model_folder import cache_folder
from kvferry.util.addresses import free_port
from support.waiting import PATIENCE_S

START_TIMEOUT_S = 30.0
FETCH_TIMEOUT_S = 60.0
# A machine without a network is to say so soon.
_APT = ("apt-get", "-q", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::Retries=0")


class NoPrometheus(Exception):
    """There is none, and none can be had; the message says what was tried."""


def find_prometheus() -> Path:
    """Raises NoPrometheus."""
    on_path = shutil.which("prometheus")
    if on_path is not None:
        return Path(on_path)
    unpacked = cache_folder() / "prometheus"
    program = unpacked / "usr" / "bin" / "prometheus"
    if not os.access(program, os.X_OK):
        _unpack_package(unpacked)
    return program


def _unpack_package(into: Path) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NoPrometheus(f"no prometheus on PATH, and no {tool} to get Debian's package with")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        try:
            _run([*_APT, "download", "prometheus"], folder)
        except NoPrometheus:
            # Perhaps this machine has no package lists yet; that needs root.
            _run([*_APT, "update"], folder)
            _run([*_APT, "download", "prometheus"], folder)
        (package,) = Path(folder).glob("prometheus_*.deb")
        unpacked = Path(folder) / "unpacked"
        _run(["dpkg-deb", "-x", str(package), str(unpacked)], folder)
        # Whole or not at all: another run may be doing the same.
        if not into.exists():
            unpacked.rename(into)


def _run(command: list[str], folder: str) -> None:
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoPrometheus(f"no prometheus on PATH, and `{' '.join(command)}` takes too long") from None
    if result.returncode != 0:
        raise NoPrometheus(f"no prometheus on PATH, and `{' '.join(command)}` failed: {result.stderr.strip()[-300:]}")


class PrometheusServer:
    """`with PrometheusServer(folder, scrape_configs) as server:`; scrapes every 200 ms."""

    def __init__(self, folder: Path, scrape_configs: list[dict[str, Any]]) -> None:
        self._folder = folder
        self._config = {
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "1m"},
            "scrape_configs": scrape_configs,
        }
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrometheusServer:
        program = find_prometheus()
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(self._config), encoding="utf-8")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={file}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--log.level=warn",
                ],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.__exit__()
                raise AssertionError(f"prometheus did not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query: `metric` (labels) and `value` (time, text)."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": expression}, timeout=PATIENCE_S).json()
        assert answer["status"] == "success", answer
        assert answer["data"]["resultType"] == "vector"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Of an expression with one sample; None where there is none."""
        samples = self.query(expression)
        assert len(samples) <= 1, f"{expression}: {len(samples)} samples"
        return float(samples[0]["value"][1]) if samples else None

    def metadata(self) -> dict[str, dict[str, str]]:
        """Name -> type, help and unit, as the targets say."""
        answer = httpx.get(f"{self._url}/api/v1/metadata", timeout=PATIENCE_S).json()
        return {name: entries[0] for name, entries in answer["data"].items()}

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/-/ready", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False
