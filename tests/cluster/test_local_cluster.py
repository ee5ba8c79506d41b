"""A whole cluster on this machine with the twin engine: up, status, down, and every way to be interrupted."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml

from kvferry.gateway.identity.key_file import new_key
from kvferry.util.addresses import free_port
from kvferry.util.shared_memory import SHM_ROOT, SharedMemoryFile, held_by, recorded, write_record
from kvferry_client import Client
from kvferry_local.gateway_access import KEY_VARIABLE
from support.local_machine import (
    Machine,
    a_machine,
    assert_nothing_left,
    kill_everything,
    listening_ports,
    shm_files,
)
from support.otlp_collector import Collector
from support.waiting import PATIENCE_S, wait_until

MODEL = "SmolLM2-135M-Instruct"  # the default's name, with the twin too

pytestmark = [pytest.mark.cluster, pytest.mark.ray]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with a_machine("sim") as machine:
        yield machine


def test_up_answers_and_down_leaves_nothing(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It asks for a key, which commands find in their environment, and the curl line in its shell's.
    key = new_key(tmp_path / "keys.yaml", "acme", "it", operator=True)
    monkeypatch.setenv(KEY_VARIABLE, key)
    with Collector() as collector:
        check_up_and_down(machine, collector, tmp_path / "keys.yaml", key)


def trace_of(machine: Machine, key: str) -> str:
    """Of a request that was prefilled on one worker and decoded on another."""
    body = {"model": MODEL, "prompt": "one two three four five six", "max_tokens": 8}
    headers = {"x-kvferry-debug": "disaggregate", "authorization": f"Bearer {key}"}
    answer = httpx.post(f"{machine.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["traceparent"].split("-")[1]


def status_of_all(machine: Machine) -> dict[str, Any]:
    """Return the status that lists all three members with their loads.

    On a busy machine a worker may renew its lease late, or not answer within the command's time.
    """
    seen: dict[str, Any] = {}

    def lists_all() -> bool:
        shown = machine.run("status", "--json")
        assert shown.returncode == 0, shown
        seen.update(json.loads(shown.stdout))
        return [member["kind"] for member in seen["members"]] == ["prefill", "decode", "gateway"] and all(
            member["load"] is not None for member in seen["members"][:2]
        )

    wait_until(lists_all, what="all members are listed with their loads")
    return seen


def check_up_and_down(machine: Machine, collector: Collector, keys_file: Path, key: str) -> None:
    shown_key = {"authorization": f"Bearer {key}"}
    settings = (f"gateway.keys_file={keys_file}", "log_level=DEBUG", f"tracing.endpoint={collector.endpoint}")
    up = machine.up(*(part for setting in settings for part in ("--set", setting)))
    assert up.returncode == 0, up.stdout + up.stderr

    # What a newcomer reads.
    for said in ("question", "answer", "TTFT", "prefilled", "decoded", "ferried", machine.url, "curl ", "make down"):
        assert said in up.stdout
    assert "prefill-" in up.stdout
    assert "decode-" in up.stdout
    assert "KV page" in up.stdout, "the first answer was not ferried"

    # The curl line works as it is printed.
    command = up.stdout[up.stdout.index("curl ") :].split("\n\n")[0]
    answer = subprocess.run(["bash", "-c", f"{command} -sS --max-time 60"], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]

    # So does gRPC where it says.
    (target,) = re.findall(r"gRPC at (127\.0\.0\.1:\d+)", up.stdout)
    with Client(target, api_key=key) as client:
        assert client.generate("What does a ferry do?", max_tokens=4, timeout_s=PATIENCE_S).usage.completion_tokens > 0

    # Its processes know each other by certificates of this start.
    record = machine.folder.record()
    assert record is not None
    assert record.config["worker"]["tls"]["cert_file"] == str(machine.folder.tls / "tls.crt")
    member = status_of_all(machine)["members"][0]
    with grpc.insecure_channel(member["address"]) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/kvferry.wire.v1.Worker/Describe")(b"", timeout=PATIENCE_S)

    # Three processes had a part in it, and one tree tells which.
    trace_id = trace_of(machine, key)
    # What ends last in each process.
    last = {"worker prefill", "worker decode", f"text_completion {MODEL}"}
    wait_until(lambda: last <= {span.name for span in collector.spans(trace_id)}, what="the whole trace arrived")
    root = collector.tree(trace_id)
    assert {span.service for span in root.all()} == {"kvferry-gateway", "kvferry-prefill", "kvferry-decode"}
    kv_transfer = root.find("decode", "worker decode", "ferry")
    assert (
        root.start_s
        < root.find("prefill", "worker prefill").end_s
        < kv_transfer.start_s
        < kv_transfer.end_s
        < root.end_s
    )

    # A second up says that one runs, and changes nothing.
    processes = machine.processes()
    again = machine.up()
    assert again.returncode == 1
    assert machine.url in again.stderr
    assert "already runs" in again.stderr
    assert "Traceback" not in again.stderr
    assert httpx.get(f"{machine.url}/readyz", trust_env=False).json()["ready"] is True

    # Status lists who is there.
    status = status_of_all(machine)
    prefill, decode, gateway = status["members"]
    assert prefill["load"]["num_pages"] > 0
    assert decode["load"]["prompt_tokens_ferried"] > 0
    assert decode["load"]["ferried_bytes"] > 0
    assert gateway["address"] == f"127.0.0.1:{machine.port}"

    # Prometheus finds everybody through the gateway.
    targets = httpx.get(f"{machine.url}/kvferry/v1/targets", headers=shown_key).json()
    addresses = sorted(member["metrics_address"] for member in status["members"])
    assert sorted(target["targets"][0] for target in targets) == addresses
    names = {"gateway": "kvferry_requests_total", "prefill": "kvferry_engine_steps_total"}
    for target in targets:
        seen = httpx.get(f"http://{target['targets'][0]}/metrics").text
        assert names.get(target["labels"]["kind"], "kvferry_ferry_bytes_total") in seen

    shown = machine.run("status")
    assert shown.returncode == 0, shown
    for member in status["members"]:
        assert member["member_id"] in shown.stdout, shown
        assert member["address"] in shown.stdout, shown

    # Why a request went where it went.
    answer_id = json.loads(answer.stdout)["id"]
    told = machine.run("explain", answer_id, "--json")
    assert told.returncode == 0, told
    (explained,) = json.loads(told.stdout)
    (choice,) = explained["choices"]
    assert (choice["decode"], choice["reason"]) == (decode["member_id"], explained["reason"])
    assert choice["price"]["total_ms"] > 0
    table = machine.run("explain", answer_id)
    assert table.returncode == 0, table
    for said in (decode["member_id"], choice["reason"], "chosen", "total"):
        assert said in table.stdout, table
    unknown = machine.run("explain", "cmpl-unknown")
    assert unknown.returncode == 1
    assert "no gateway remembers the request 'cmpl-unknown'" in unknown.stderr

    # The key is nowhere: not in logs of ours and Ray's, not in etcd's data or traces, in no record, in no process.
    searched = [path for path in machine.folder.path.rglob("*") if path.is_file() and not path.is_symlink()]
    names = {path.name for path in searched}
    assert {"cluster.json", "config.yaml", "etcd.log", "deploy.log", "db"} <= names, names
    assert any(path.suffix in (".err", ".log") and b"listens on" in path.read_bytes() for path in searched)
    secret = key.removeprefix("kvf_").encode()
    assert [path for path in searched if secret in path.read_bytes()] == []
    for process in processes:
        assert secret not in Path(f"/proc/{process.pid}/environ").read_bytes()
    metrics = httpx.get(f"{machine.url}/metrics", headers=shown_key, trust_env=False)
    assert metrics.status_code == 200
    assert secret.decode() not in metrics.text
    assert collector.raw
    assert secret not in b"".join(collector.raw)

    # Everything listens on loopback, what Ray and Serve start included.
    ports = listening_ports(processes)
    assert machine.port in ports
    assert {port: ip for port, ip in ports.items() if not ip.removeprefix("::ffff:").startswith("127.")} == {}
    for process in processes:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)

    held = held_by(process.pid for process in processes)
    down = machine.down()
    assert down.returncode == 0, down.stdout + down.stderr
    assert re.search(r"ended \d+ processes", down.stdout)
    assert_nothing_left(machine, processes, ports)
    # Other clusters may run meanwhile; of what this one's processes held, nothing is there.
    assert not held & shm_files()

    assert "nothing was running" in machine.down().stdout
    missing = machine.run("status")
    assert missing.returncode == 1
    assert "no cluster runs here" in missing.stderr


STRANGER = Path(__file__).parents[1] / "support" / "stranger.py"


@pytest.fixture(scope="module")
def open_machine() -> Iterator[Machine]:
    """A cluster with tenants. Its run folder was there and lets others in: what is made in it is private by itself."""
    with a_machine("sim") as machine:
        machine.folder.path.mkdir()
        machine.folder.path.chmod(0o755)
        machine.folder.path.parent.chmod(0o755)
        up = machine.up("--no-ask", "--set", "gateway.tenants_in_etcd=true")
        assert up.returncode == 0, up.stdout + up.stderr
        yield machine


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_reads_and_writes_nothing_of_it(open_machine: Machine) -> None:
    machine = open_machine
    created = machine.run("tenant", "create", "acme", "--key", "ci")
    assert created.returncode == 0, created.stderr

    record = machine.folder.record()
    assert record is not None
    (etcd,) = (pillar for pillar in record.pillars if psutil.Process(pillar.pid).name() == "etcd")
    paths = [str(path) for path in machine.folder.path.rglob("*") if not path.is_symlink()]
    paths += [f"{SHM_ROOT}/{file.name}" for file in held_by(process.pid for process in machine.processes())]
    asked = {"paths": paths, "ports": list(listening_ports((etcd,)))}
    assert {"db", "tls.key", "config.yaml", "token"} <= {Path(path).name for path in paths}
    assert len(asked["ports"]) == 2

    done = subprocess.run([sys.executable, STRANGER], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [], done.stdout
    shown = machine.run("tenant", "list")
    assert "acme" in shown.stdout, "the owner's commands find etcd and its certificates by themselves"


def test_a_cluster_that_died_is_cleaned_up(open_machine: Machine) -> None:
    """The last test of this cluster: it kills it."""
    machine = open_machine
    processes = machine.processes()
    ports = listening_ports(processes)
    # What an engine would leave in shared memory: recorded by its worker, held by nobody after the kill.
    leaked = SHM_ROOT / f"kvferry-test-{os.getpid()}"
    leaked.write_bytes(b"page")
    try:
        write_record(machine.folder.path, "worker-x", [SharedMemoryFile(leaked.stat().st_ino, leaked.name)])
        kill_everything(machine)
        status = machine.run("status")
        assert status.returncode == 1
        assert "has died" in status.stderr
        assert machine.folder.record() is not None

        # Up cleans what is left by itself.
        again = machine.up("--no-ask")
        assert again.returncode == 0, again.stdout + again.stderr
        assert "cleaned up after a cluster that had died" in again.stdout
        assert not leaked.exists()
    finally:
        leaked.unlink(missing_ok=True)
    second = machine.processes()
    assert not set(second) & set(processes)
    ports |= listening_ports(second)
    left_recorded = recorded(machine.folder.path)

    # Down does after the death of Ray alone, which leaves its workers. (`test_real_cluster.py` kills all before it.)
    record = machine.folder.record()
    assert record is not None
    for pillar in record.pillars:
        pillar.send(signal.SIGKILL)
    assert machine.down().returncode == 0
    assert_nothing_left(machine, second, ports)
    assert not left_recorded & shm_files()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("etcd", signal.SIGINT),
        ("ray", signal.SIGTERM),
        ("deploy", signal.SIGINT),
    ],
)
def test_an_interrupted_start_leaves_nothing(machine: Machine, moment: str, number: signal.Signals) -> None:
    up = machine.start(*machine.up_arguments)
    try:
        log = machine.folder.logs / f"{moment}.log"
        wait_until(lambda: log.exists() or up.poll() is not None, what=f"{moment} being started")
        assert up.poll() is None
        processes = machine.processes()
        up.send_signal(number)
        # Impatience changes nothing.
        up.send_signal(number)
        _, err = up.communicate(timeout=PATIENCE_S)
    finally:
        if up.poll() is None:
            up.kill()
            up.communicate()
    assert up.returncode == 130
    assert "interrupted; nothing is left running" in err
    assert "Traceback" not in err
    assert_nothing_left(machine, processes, {machine.port: "127.0.0.1"})


def test_down_interrupts_a_start(machine: Machine) -> None:
    up = machine.start(*machine.up_arguments)
    try:
        wait_until(lambda: (machine.folder.logs / "ray.log").exists(), what="Ray being started")
        processes = machine.processes()
        busy = machine.up()
        assert busy.returncode == 1
        assert f"process {up.pid}" in busy.stderr
        assert machine.down().returncode == 0
        assert up.wait(PATIENCE_S) == 130
    finally:
        if up.poll() is None:
            up.kill()
        up.communicate()
    assert_nothing_left(machine, processes, {machine.port: "127.0.0.1"})


def test_a_taken_port_is_named_with_its_owner_before_anything_starts(machine: Machine) -> None:
    listener = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen();"
            "print('listening', flush=True); sys.stdin.read()",
            str(machine.port),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        up = machine.up()
    finally:
        listener.kill()
        listener.communicate()
    assert up.returncode == 2
    for said in (f"127.0.0.1:{machine.port}", f"process {listener.pid}", "--http-port"):
        assert said in up.stderr
    assert not machine.folder.path.exists()


def test_an_etcd_that_cannot_be_reached_ends_the_start_at_once(machine: Machine) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    up = machine.up("--etcd", endpoint)
    assert up.returncode == 1
    assert f"etcd cannot be reached: {endpoint}" in up.stderr
    assert "Traceback" not in up.stderr
    assert machine.processes() == ()


def test_a_part_that_dies_ends_the_start_with_the_end_of_its_log(machine: Machine) -> None:
    up = machine.start(*machine.up_arguments)
    try:
        deploying = machine.folder.logs / "deploy.log"
        wait_until(lambda: deploying.exists() or up.poll() is not None, what="the application submitted")
        record = machine.folder.record()
        assert record is not None
        began = time.monotonic()
        for pillar in record.pillars:
            pillar.send(signal.SIGKILL)
        out, err = up.communicate(timeout=PATIENCE_S)
    finally:
        if up.poll() is None:
            up.kill()
            up.communicate()
    assert up.returncode == 1
    assert "Ray died" in err or "killed by signal 9" in err
    assert "Traceback (most recent call last)" not in err.partition("\n")[0]
    assert time.monotonic() - began < 60
    assert machine.processes() == ()
    # The logs stay, and are named.
    assert str(machine.folder.logs) in out
    assert (machine.folder.logs / "etcd.log").exists()
    assert machine.down().returncode == 0
    assert not machine.folder.path.exists()


def test_workers_that_cannot_start_end_the_start_with_their_reason(machine: Machine) -> None:
    host = ("--set", "engine.side_channel_host=192.0.2.1", "--set", "insecure=true")
    up = machine.up(*host)
    assert up.returncode == 1
    reason = "Worker: the sim engine cannot listen on '192.0.2.1'"
    # While Serve tries again, and when it has given up; long before the time of `up` is over.
    assert reason in up.stdout
    assert "Retrying" in up.stdout
    assert "Ray Serve has given up: the application is DEPLOY_FAILED: " in up.stderr
    assert reason in up.stderr
    assert "Traceback" not in up.stderr
    assert machine.processes() == ()


def test_pools_start_with_the_rest_and_are_named(machine: Machine) -> None:
    role = "{num_cpus: 0.1}"
    pools = f"{{finance: {{dedicated: true, prefill: {role}, decode: {role}}}, empty: {{prefill: {{replicas: 0}}, "
    up = machine.up(
        *("--no-ask", "--set", f"pools={pools}decode: {{replicas: 0}}}}}}"),
        *("--set", "gateway.tenants_in_etcd=true"),
    )
    assert up.returncode == 0, up.stdout + up.stderr
    members: dict[str, list[str]] = {}

    def lists_all() -> bool:
        members.clear()
        for member in json.loads(machine.run("status", "--json").stdout)["members"]:
            members.setdefault(member["pool"], []).append(member["kind"])
        return members == {"": ["prefill", "decode", "gateway"], "finance": ["prefill", "decode"]}

    wait_until(lists_all, what=f"all members are listed: {members}")
    assert "decode of pool finance" in machine.run("status").stdout
    made = machine.run("tenant", "create", "bank", "--pool", "finance", "--key", "ci")
    assert (made.returncode, "503" in made.stderr) == (0, False), "its gateway knows the pool"
    key = machine.run("tenant", "key", "new", "bank", "ops", "--operator").stdout.strip()
    body = {"model": MODEL, "prompt": "one two three four five six", "max_tokens": 8}
    headers = {"x-kvferry-debug": "disaggregate", "authorization": f"Bearer {key}"}
    answers: list[httpx.Response] = []

    def is_known() -> bool:
        answers.append(httpx.post(f"{machine.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S))
        return answers[-1].status_code != 401

    wait_until(is_known, what="the gateway knows the new key")  # it follows records of etcd
    answer = answers[-1]
    assert answer.status_code == 200, answer.text
    record = answer.json()["kvferry"]
    assert record["pool"] == "finance"
    assert record["prefill_worker"].startswith("prefill-finance-")
    assert record["decode_worker"].startswith("decode-finance-")
    assert machine.run("tenant", "set", "bank", "--pool", "empty").returncode == 0

    def is_refused() -> bool:
        refused = httpx.post(f"{machine.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
        return refused.status_code == 503 and "no decode worker of pool 'empty' is connected" in refused.text

    wait_until(is_refused, what="the pool without workers is named")


def entry(name: str, revision: str, **model: Any) -> dict[str, Any]:
    role = {"num_cpus": 0.1}
    return {
        "name": name,
        "model": {"path": f"org/{name}", "revision": revision, **model},
        "prefill": role,
        "decode": role,
    }


class Load:
    """Clients of two names that never pause, and what they got."""

    def __init__(self, machine: Machine) -> None:
        self.answers: Counter[str] = Counter()  # by model that answered
        self.faults: list[str] = []
        self._texts: dict[tuple[str, str], set[str]] = {}  # by model and prompt
        self._url = machine.url
        self._is_over = threading.Event()
        self._clients = [
            threading.Thread(target=self._ask, args=(name, i)) for i in range(2) for name in ("chat", "beta")
        ]

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join()

    def _ask(self, name: str, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S, trust_env=False) as http:
            for i in itertools.count(number):
                if self._is_over.is_set():
                    return
                prompt = f"one two three {i % 5}"
                body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                try:
                    answer = http.post("/v1/completions", json=body, headers={"x-kvferry-debug": "1"})
                except httpx.HTTPError as error:
                    self.faults.append(repr(error))
                    continue
                if answer.status_code != 200:
                    self.faults.append(answer.text)
                    continue
                model = answer.json()["kvferry"]["pool"]
                self._texts.setdefault((model, prompt), set()).add(answer.json()["choices"][0]["text"])
                if model not in (("beta",) if name == "beta" else ("alpha", "alpha-2")):
                    self.faults.append(f"{name} was answered by {model}")
                self.answers[model] += 1

    def until_answers_of(self, model: str) -> None:
        goal = self.answers[model] + 20
        wait_until(lambda: self.answers[model] >= goal, what=f"more answers of {model}")

    def check(self) -> None:
        assert self.faults == []
        assert all(len(texts) == 1 for texts in self._texts.values()), "a model always answers alike"
        by_prompt: dict[str, list[str]] = {}
        for (_, prompt), texts in self._texts.items():
            by_prompt.setdefault(prompt, []).extend(texts)
        assert all(len(set(texts)) == len(texts) for texts in by_prompt.values()), "and no two of them do"


def test_a_model_is_replaced_while_another_serves(machine: Machine, tmp_path: Path) -> None:
    """Up with a changed file: a new entry, a share for it, its predecessor's name, and the end of that one."""
    file = tmp_path / "cluster.yaml"

    def up(*models: dict[str, Any], **more: Any) -> subprocess.CompletedProcess[str]:
        none = {"replicas": 0}
        file.write_text(yaml.safe_dump({"prefill": none, "decode": none, "models": list(models), **more}))
        return machine.up("--no-ask", "--config", str(file))

    def members(pool: str) -> dict[str, int]:
        shown = json.loads(machine.run("status", "--json").stdout)["members"]
        return {member["member_id"]: member["pid"] for member in shown if member["pool"] == pool}

    alpha, beta, new = entry("alpha", "1", served_name="chat"), entry("beta", "b1"), entry("alpha-2", "2")
    started = up(alpha, beta)
    assert started.returncode == 0, started.stdout + started.stderr
    assert "kvferry serves chat, beta at" in started.stdout
    wait_until(lambda: len(members("beta")) == len(members("alpha")) == 2, what="all are listed")
    of_beta, gateway = members("beta"), members("")
    assert "decode of model beta" in machine.run("status").stdout
    with Load(machine) as load:
        load.until_answers_of("alpha")
        refused = up(alpha, beta, new, gateway={"queue_timeout_s": 5})
        assert refused.returncode == 2, refused
        assert "gateway.queue_timeout_s: the cluster 'kvferry' runs with another value" in refused.stderr
        with_share = entry("alpha", "1", served_name="chat", canary={"alpha-2": 50})
        changed = up(with_share, beta, new)
        assert changed.returncode == 0, changed.stdout + changed.stderr
        load.until_answers_of("alpha-2")
        whole = up(entry("alpha", "1", served_name="chat", canary={"alpha-2": 100}), beta, new)
        assert whole.returncode == 0, whole.stdout + whole.stderr
        load.until_answers_of("alpha-2")
        heir = entry("alpha-2", "2", aliases=["chat"])
        last = up(heir, beta)
        assert last.returncode == 0, last.stdout + last.stderr
        wait_until(lambda: not members("alpha"), what="the old model's workers end")
        before = load.answers["alpha"]
        load.until_answers_of("alpha-2")
        load.until_answers_of("beta")
        assert load.answers["alpha"] == before
    load.check()
    assert members("beta") == of_beta, "the same processes with the same engines"
    assert members("") == gateway, "the gateway was not restarted either"
    again = up(heir, beta)
    assert again.returncode == 1
    assert "already runs" in again.stderr
    names = [each["id"] for each in httpx.get(f"{machine.url}/v1/models").json()["data"]]
    assert names == ["alpha-2", "chat", "beta"]
