"""What is rendered, started for real: etcd with its certificates and users, the application on a Ray of its own, with
keys, mutual TLS and both protocols; counts changed under load; a gateway as its pod runs it; jobs; the end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from bench.etcd_server import find_binary
from kvferry import model_folder
from kvferry.hub_model import marker
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.inference.v1.inference_pb2_grpc import InferenceStub
from kvferry.util.addresses import free_port
from support.all_models import only_with_all_models
from support.chart import newest_helm, one, write_values
from support.fake_api_server import write_kubeconfig
from support.kuberay_model import Model, serving
from support.ray_cluster import RayCluster, a_ray_cluster
from support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.ray]

MODEL = "sim-model"


@dataclass
class Site:
    """Where the rendered objects are at home: a folder for their secrets, and ports of this machine for their names."""

    folder: Path
    http_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    etcd_ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in ("2379", "2380", "2381")})

    def values(self, prefill: int = 1, decode: int = 1, *, mode: str = "serve") -> dict[str, Any]:
        return {
            "config": {
                "model": {"path": MODEL},
                "engine": {"kind": "sim", "block_size": 16},
                "sim": {"step_ms": 5, "max_model_len": 4096},
                "worker": {"drain_timeout_s": 20},
                "gateway": {"drain_timeout_s": 10},
            },
            "roles": {
                "prefill": {"replicas": prefill, "cpusPerWorker": 0.5},
                "decode": {"replicas": decode, "cpusPerWorker": 0.5},
            },
            "gateway": {"mode": mode, "httpPort": self.http_port, "grpcPort": self.grpc_port, "lingerSeconds": 1},
        }

    def render(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        rendered: list[dict[str, Any]] = newest_helm().documents(values=write_values(self.folder, values))
        return rendered

    def local(self, text: str) -> str:
        """What a file or argument says, with this machine's folders and ports."""
        text = text.replace("/etc/kvferry/", f"{self.folder}/etc/")
        return re.sub(
            r"(?:[\w$().-]+\.svc|0\.0\.0\.0):(2379|2380|2381)",
            lambda match: f"127.0.0.1:{self.etcd_ports[match[1]]}",
            text,
        )

    def mount(self, rendered: list[dict[str, Any]]) -> None:
        """Write the secrets and the configuration where the pods of a rendering would find them."""
        places = {
            "trial-internal-tls": "tls/internal",
            "trial-keys": "keys",
            "trial-first-key": "first-key",
            "trial-etcd-tls": "etcd",
            "trial-etcd-users": "etcd",
        }
        for name, place in places.items():
            for file, content in one(rendered, "Secret", name)["data"].items():
                self._write(f"{place}/{file}", base64.b64decode(content))
        self.configure(rendered)

    def configure(self, rendered: list[dict[str, Any]]) -> Path:
        text = one(rendered, "ConfigMap")["data"]["kvferry.yaml"]
        return self._write("config/kvferry.yaml", self.local(text).encode())

    def serve_file(self, text: str) -> Path:
        return self._write("serve.yaml", self.local(text).encode())

    def _write(self, place: str, content: bytes) -> Path:
        file = self.folder / "etc" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    @property
    def key(self) -> str:
        return (self.folder / "etc" / "first-key" / "key").read_text()

    @property
    def authorization(self) -> str:
        return f"Bearer {self.key}"


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def ask(site: Site, port: int, *, max_tokens: int = 4, model: str = MODEL) -> str:
    body = {"model": model, "prompt": "A ferry carries", "max_tokens": max_tokens, "temperature": 0}
    headers = {"authorization": site.authorization}
    answer = httpx.post(f"{url(port)}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def ask_grpc(site: Site, port: int, *, max_tokens: int = 4) -> str:
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=0)
    request = pb.GenerateRequest(model=MODEL, text="A ferry carries", sampling=sampling)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = InferenceStub(channel).Generate(
            request, timeout=PATIENCE_S, metadata=[("authorization", site.authorization)], wait_for_ready=True
        )
    return "".join(each.text for each in answer.answers)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Secrets in place, and etcd running with the arguments of its pod and the users of its job."""
    site = Site(tmp_path_factory.mktemp("site"))
    rendered = site.render(site.values())
    site.mount(rendered)
    pod = one(rendered, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    binary = find_binary()
    assert binary is not None
    assert pod["command"] == ["etcd"]
    replaced = {"$(POD_NAME)": "trial-etcd-0", "/var/lib/etcd": str(site.folder / "etcd-data")}
    arguments = []
    for argument in map(site.local, pod["args"]):
        for old, new in replaced.items():
            argument = argument.replace(old, new)
        arguments.append(argument)
    with (site.folder / "etcd.log").open("wb") as log:
        etcd = subprocess.Popen(
            [binary, *arguments, "--unsafe-no-fsync"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        (job,) = (each for each in rendered if "etcd-users" in each["metadata"]["name"] and each["kind"] == "Job")
        container = job["spec"]["template"]["spec"]["containers"][0]
        command = container["command"] + [
            site.local(each).replace("etc/etcd-root/", "etc/etcd/") for each in container["args"]
        ]
        done = subprocess.run(
            [sys.executable, *command[1:]], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr + (site.folder / "etcd.log").read_text()[-2000:]
        # What its probes ask, which holds no certificate.
        assert httpx.get(f"{url(site.etcd_ports['2381'])}/health", trust_env=False).json()["health"] == "true"
        yield site
    finally:
        etcd.kill()
        etcd.wait()


@pytest.fixture(scope="module")
def ray(site: Site) -> Iterator[RayCluster]:
    entries = [f"{role}-{name}" for role in ("prefill", "decode") for name in ("alpha", "beta", "gamma")]
    resources = {f"kvferry_{group}": 8.0 for group in ("prefill", "decode", "gateway", *entries)}
    with a_ray_cluster(resources=resources, environ={"KVFERRY_NODE_ADDRESS": "127.0.0.1"}) as cluster:
        yield cluster


def deploy(ray: RayCluster, site: Site, prefill: int, decode: int) -> None:
    service = one(site.render(site.values(prefill, decode)), "RayService")
    ray.run("serve", "deploy", str(site.serve_file(service["spec"]["serveConfigV2"])), "-a", ray.dashboard)


def settle(ray: RayCluster, **counts: int) -> dict[str, dict[str, int]]:
    """Wait until so many replicas run and nothing else; returns their processes by deployment and replica."""
    running: dict[str, dict[str, int]] = {}

    def settled() -> bool:
        nonlocal running
        application = ray.application()
        assert application is not None
        assert application["status"] not in ("DEPLOY_FAILED", "UNHEALTHY"), application["message"]
        running = {name: ray.running(name) for name in counts}
        states = [each["replicas"] for each in application["deployments"].values()]
        return (
            application["status"] == "RUNNING"
            and {name: len(replicas) for name, replicas in running.items()} == counts
            and sum(map(len, states)) == sum(counts.values())
        )

    wait_until(settled, what=f"{counts} replicas")
    return running


@dataclass
class Load:
    """Streams without a pause, from a thread; what failed, and how many did not."""

    site: Site
    num_streams: int = 8
    models: tuple[str, ...] = (MODEL,)
    num_done: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    stopping: threading.Event = dataclasses.field(default_factory=threading.Event)

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": self.site.authorization}
        async with httpx.AsyncClient(headers=headers, timeout=PATIENCE_S, trust_env=False, limits=limits) as client:
            await asyncio.gather(*(self._stream(client, number) for number in range(self.num_streams)))

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        while not self.stopping.is_set():
            body = {
                "model": self.models[number % len(self.models)],
                "prompt": f"stream {number} " * 40,
                "max_tokens": 100,
                "ignore_eos": True,
                "stream": True,
            }
            try:
                where = f"{url(self.site.http_port)}/v1/completions"
                async with client.stream("POST", where, json=body) as answer:
                    lines = [line async for line in answer.aiter_lines() if line]
                ended = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines[:-1]]
                if answer.status_code != 200 or lines[-1] != "data: [DONE]" or ended[-1] != "length":
                    self.failures.append(f"{answer.status_code}: {lines[-2:]}")
            except (httpx.HTTPError, ValueError, IndexError, KeyError) as error:
                self.failures.append(repr(error))
            self.num_done += 1


@contextlib.contextmanager
def loaded(site: Site, *models: str) -> Iterator[Load]:
    load = Load(site, models=models or (MODEL,))
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        yield load
    finally:
        load.stopping.set()
        thread.join()


def members(site: Site) -> list[str]:
    """Workers of the gateway, which names them to operators."""
    headers = {"authorization": site.authorization}
    named: list[str] = httpx.get(f"{url(site.http_port)}/readyz", headers=headers, trust_env=False).json()["members"]
    return named


def test_the_rendered_application_serves_both_protocols_to_who_has_a_key(ray: RayCluster, site: Site) -> None:
    deploy(ray, site, 1, 1)
    settle(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1)
    wait_until(
        lambda: httpx.get(f"{url(site.http_port)}/readyz", trust_env=False).status_code == 200,
        what="readiness",
    )
    refused = httpx.post(f"{url(site.http_port)}/v1/completions", json={"model": MODEL, "prompt": "x"}, trust_env=False)
    assert refused.status_code == 401
    assert ask(site, site.http_port) == ask_grpc(site, site.grpc_port)


def test_counts_change_under_load_and_nothing_else_does(ray: RayCluster, site: Site) -> None:
    deploy(ray, site, 1, 1)
    before = settle(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1)
    with loaded(site) as load:
        wait_until(lambda: load.num_done >= 8, what="streams")
        deploy(ray, site, 2, 3)
        more = settle(ray, PrefillWorker=2, DecodeWorker=3, Gateway=1)
        expected = members(site)
        assert len(expected) == 5, expected
        wait_until(lambda: load.num_done >= 40, what="streams on all workers")
        deploy(ray, site, 1, 1)
        fewer = settle(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1)
    assert load.failures == []
    # Those that stay are the processes that were there.
    for deployment, replicas in before.items():
        assert replicas.items() <= more[deployment].items()
        assert fewer[deployment].items() <= more[deployment].items()
    assert fewer["Gateway"] == before["Gateway"]


def deploy_models(ray: RayCluster, site: Site, *entries: dict[str, Any], **counts: int) -> None:
    """Deploy the chart's applications of the default model and of entries, as KubeRay does: one PUT of them all."""
    values = site.values()
    values["config"]["models"] = list(entries)
    values["roles"]["models"] = {name: {"decode": {"replicas": count}} for name, count in counts.items()}
    service = one(site.render(values), "RayService")
    ray.run("serve", "deploy", str(site.serve_file(service["spec"]["serveConfigV2"])), "-a", ray.dashboard)


def settle_models(ray: RayCluster, **counts: int) -> dict[str, dict[str, int]]:
    """Wait until these deployments of all applications have so many replicas, and no others any.

    Returns their processes by deployment and replica.
    """
    wanted = {name.replace("_", "-"): count for name, count in counts.items()}
    running: dict[str, dict[str, int]] = {}

    def settled() -> bool:
        nonlocal running
        applications = ray.serve_details()["applications"].values()
        assert {each["status"] for each in applications}.isdisjoint({"DEPLOY_FAILED", "UNHEALTHY"}), applications
        replicas = {
            name: deployment["replicas"] for each in applications for name, deployment in each["deployments"].items()
        }
        running = {name: {each["replica_id"]: each.get("pid", 0) for each in found} for name, found in replicas.items()}
        return (
            {each["status"] for each in applications} == {"RUNNING"}
            and {each["state"] for found in replicas.values() for each in found} == {"RUNNING"}
            and {name: len(found) for name, found in running.items()} == wanted
        )

    wait_until(settled, what=f"{wanted} replicas")
    return running


def test_one_model_of_several_changes_under_load_and_no_other_does(ray: RayCluster, site: Site) -> None:
    alpha, beta = {"name": "alpha"}, {"name": "beta", "model": {"aliases": ["b"]}}
    gamma = {"name": "gamma"}
    default = {"PrefillWorker": 1, "DecodeWorker": 1, "Gateway": 1}
    of_alpha = {"PrefillWorker_alpha": 1, "DecodeWorker_alpha": 1}
    of_beta = {"PrefillWorker_beta": 1, "DecodeWorker_beta": 1}

    def answers(*models: str) -> None:
        def answered(model: str) -> bool:
            body = {"model": model, "prompt": "x", "max_tokens": 2}
            headers = {"authorization": site.authorization}
            where = f"{url(site.http_port)}/v1/completions"
            return httpx.post(where, json=body, headers=headers, timeout=PATIENCE_S, trust_env=False).status_code == 200

        for model in models:
            wait_until(lambda model=model: answered(model), what=f"an answer of {model}")

    deploy_models(ray, site, alpha, beta)
    before = settle_models(ray, **default, **of_alpha, **of_beta)
    answers(MODEL, "alpha", "beta", "b")
    with loaded(site, MODEL, "alpha") as load:
        # Another model of that name, more workers of it, another entry, and names that change.
        renamed = {**alpha, "model": {"aliases": ["a"]}}
        deploy_models(ray, site, renamed, {**beta, "model": {"revision": "2"}}, gamma, beta=2)
        of_gamma = {"PrefillWorker_gamma": 1, "DecodeWorker_gamma": 1}
        changed = settle_models(ray, **default, **of_alpha, **{**of_beta, "DecodeWorker_beta": 2}, **of_gamma)
        answers("beta", "gamma", "a")
        # Two go.
        deploy_models(ray, site, alpha)
        left = settle_models(ray, **default, **of_alpha)
        answers(MODEL, "alpha")
    assert load.failures == []
    assert load.num_done >= 8
    for name in left:
        assert before[name] == changed[name] == left[name], name
    for name in ("PrefillWorker-beta", "DecodeWorker-beta"):
        assert set(before[name].values()).isdisjoint(changed[name].values())
    deploy(ray, site, 1, 1)
    assert settle(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1).items() <= before.items()


def test_a_delete_ends_the_applications_of_all_models(ray: RayCluster, site: Site) -> None:
    deploy_models(ray, site, {"name": "alpha"})
    settle_models(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1, PrefillWorker_alpha=1, DecodeWorker_alpha=1)
    ray.run("python", "-m", "kvferry.app", "delete", "--ray-address", ray.address)
    assert ray.serve_details()["applications"] == {}


def test_a_gateway_of_its_own_serves_the_same_workers_and_drains(ray: RayCluster, site: Site) -> None:
    deploy(ray, site, 1, 1)
    settle(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1)
    # Beside the one that Serve runs, with ports of its own.
    own = dataclasses.replace(site, http_port=free_port(), grpc_port=free_port())
    rendered = own.render(own.values(mode="deployment"))
    own.configure(rendered)
    container = one(rendered, "Deployment", "trial-gateway")["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][0] == "python"
    process = subprocess.Popen(
        [sys.executable, *container["command"][1:], *map(own.local, container["args"])],
        env={**ray.environ, "KVFERRY_NODE_ADDRESS": "127.0.0.1"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{url(own.http_port)}/readyz", trust_env=False).status_code == 200
            assert process.poll() is None, process.communicate()[1]
            return False

        wait_until(ready, what="the gateway")
        assert ask(own, own.http_port) == ask_grpc(own, own.grpc_port) == ask(site, site.http_port)

        # Told to end, it finishes what it has.
        headers = {"authorization": own.authorization}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        where = f"{url(own.http_port)}/v1/completions"
        with httpx.stream("POST", where, json=body, headers=headers, timeout=PATIENCE_S, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(timeout=PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def a_rollout(site: Site, rendered: list[dict[str, Any]], server: str) -> Iterator[Path]:
    """The rollout as its pod runs it, until it is told to end. Yields its state folder."""
    container = one(rendered, "Deployment", "trial-rollout")["spec"]["template"]["spec"]["containers"][0]
    state = site.folder / "rollout"

    def local(words: list[str]) -> list[str]:
        return [site.local(each).replace("/tmp/rollout", str(state)) for each in words]

    process = subprocess.Popen(
        [sys.executable, *container["command"][1:], *local(container["args"])],
        env={**os.environ, "KUBECONFIG": str(write_kubeconfig(site.folder, server))},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for probe in ("startupProbe", "livenessProbe"):
            asked = functools.partial(subprocess.run, local(container[probe]["exec"]["command"]), capture_output=True)
            wait_until(lambda ask=asked: ask().returncode == 0, what=probe)
        yield state
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0
    finally:
        process.kill()
        said = process.communicate()[1]
    assert "Done: the Ray cluster is as the release says" in said


def test_a_rollout_waits_for_the_workers_that_are_registered(ray: RayCluster, site: Site) -> None:
    deploy(ray, site, 1, 2)
    settle(ray, PrefillWorker=1, DecodeWorker=2, Gateway=1)
    # Pods of a model; their workers are those of this Ray, whose address all pods share.
    model = Model(name="trial", namespace="serving", places_workers=False, address="127.0.0.1")

    def is_done(state: Path) -> bool:
        model.turn()
        return (state / "done").exists()

    with serving(model) as server:
        before, after = site.render(site.values(1, 2)), site.render(site.values(1, 3))
        model.apply(one(before, "RayService"))
        with a_rollout(site, before, server) as state:
            wait_until(lambda: is_done(state), what="the rollout")
        model.apply(one(after, "RayService"))
        with a_rollout(site, after, server) as state:
            missing = ("Waiting", "decode: 2 of 3 workers are registered")
            wait_until(lambda: not is_done(state) and missing in model.events, what="a rollout that waits")
            deploy(ray, site, 1, 3)
            wait_until(lambda: is_done(state), what="the rollout of three")
    assert sum(pod.group == "decode" for pod in model.pods) == 3


def test_the_backup_of_the_page_about_etcd(site: Site) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operator" / "etcd.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("etcdctl "))
    secrets = site.folder / "etc" / "etcd"
    line = line.replace("$PASSWORD", (secrets / "root-password").read_text()).replace(
        ":2379", f":{site.etcd_ports['2379']}"
    )
    etcdctl = find_binary("etcdctl")
    assert etcdctl is not None
    environ = {"ETCDCTL_API": "3"}
    done = subprocess.run([etcdctl, *line.split()[1:]], cwd=secrets, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (secrets / "backup.db").stat().st_size > 0


def test_what_is_wrong_with_arguments_is_said(ray: RayCluster, site: Site) -> None:
    config = yaml.safe_load(one(site.render(site.values()), "RayService")["spec"]["serveConfigV2"])
    config["applications"][0]["args"]["config"]["engine"]["blok_size"] = 16
    ray.run("serve", "deploy", str(site.serve_file(yaml.safe_dump(config))), "-a", ray.dashboard)

    def failed() -> bool:
        application = ray.application()
        return application is not None and application["status"] == "DEPLOY_FAILED"

    wait_until(failed, what="the refusal")
    application = ray.application()
    assert application is not None
    assert "engine.blok_size: unknown key (value 16); did you mean 'block_size'?" in application["message"]
    # What ran goes on.
    assert ask(site, site.http_port)


def test_replicas_wait_for_a_model_that_a_job_fills(ray: RayCluster, site: Site) -> None:
    config = yaml.safe_load(one(site.render(site.values()), "RayService")["spec"]["serveConfigV2"])
    folder = site.folder / "models" / "acme--tiny--v1"
    hub_model = {"name": "acme/tiny", "revision": "v1"}
    config["applications"][0]["args"] |= {"model_folder": str(folder), "hub_model": hub_model}
    ray.run("serve", "deploy", str(site.serve_file(yaml.safe_dump(config))), "-a", ray.dashboard)

    def starting() -> bool:
        application = ray.application()
        deployments = application["deployments"].values() if application is not None else ()
        states = [replica["state"] for each in deployments for replica in each["replicas"]]
        return "STARTING" in states and "STOPPING" not in states

    wait_until(starting, what="a replica that starts")
    application = ray.application()
    assert application is not None
    assert application["status"] == "DEPLOYING"
    staging = folder.with_name("staging")
    staging.mkdir(parents=True)
    (staging / "config.json").write_text("{}")
    marker.write(staging, marker.Marker("acme/tiny", "v1", "c0ffee", {"config.json": 2}))
    staging.rename(folder)
    settle(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1)
    assert ask(site, site.http_port)


def test_a_job_deploys_changes_counts_and_deletes(ray: RayCluster, site: Site) -> None:
    # As the chart's job for a Ray that is there, but with Serve's own gateway.
    config = yaml.safe_load(site.local(one(site.render(site.values()), "ConfigMap")["data"]["kvferry.yaml"]))
    # As Kubernetes mounts a ConfigMap, by links.
    folder = site.folder / "job"
    (folder / "..2026").mkdir(parents=True)
    (folder / "..2026" / "kvferry.yaml").write_text(yaml.safe_dump(config))
    (folder / "..data").symlink_to("..2026")
    (folder / "kvferry.yaml").symlink_to("..data/kvferry.yaml")

    command = ("python", "-m", "kvferry.app")
    arguments = ("--model-folder", MODEL, "--wait", "120")
    job = ("ray", "job", "submit", "--address", ray.dashboard, "--working-dir", str(folder), "--")
    assert "succeeded" in ray.run(*job, *command, "deploy", "--config", "kvferry.yaml", *arguments)
    before = settle(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1)
    assert ask(site, site.http_port) == ask_grpc(site, site.grpc_port)
    with loaded(site) as load:
        # The same as the job runs, from a shell of the cluster.
        here = ("--config", str(folder / "kvferry.yaml"), "--ray-address", ray.address)
        ray.run(*command, "deploy", *here, *arguments, "--set", "decode.replicas=2")
        after = settle(ray, PrefillWorker=1, DecodeWorker=2, Gateway=1)
    assert load.failures == []
    for deployment, replicas in before.items():
        assert replicas.items() <= after[deployment].items()
    ray.run(*command, "delete", "--ray-address", ray.address)
    wait_until(lambda: ray.application() is None, what="the end of the application")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url(site.http_port)}/healthz", trust_env=False)


@only_with_all_models
@pytest.mark.model
def test_real_engines_answer_over_both_protocols(ray: RayCluster, site: Site) -> None:
    """vLLM on the CPU, from what the chart renders for a model's folder."""
    folder = str(model_folder.resolve("default"))
    values = site.values()
    values["config"] = {
        "model": {"path": folder, "served_name": MODEL, "max_model_len": 1024},
        "engine": {"device": "cpu", "block_size": 32, "threads": 1, "max_num_seqs": 4},
    }
    values["model"] = {"volume": {"hostPath": folder, "mountPath": folder}}
    service = one(site.render(values), "RayService")
    ray.run("serve", "deploy", str(site.serve_file(service["spec"]["serveConfigV2"])), "-a", ray.dashboard)
    settle(ray, PrefillWorker=1, DecodeWorker=1, Gateway=1)
    wait_until(
        lambda: len(members(site)) == 2,
        what="both workers at the gateway",
    )
    text = ask(site, site.http_port, max_tokens=8)
    assert text.strip()
    assert ask_grpc(site, site.grpc_port, max_tokens=8) == text
