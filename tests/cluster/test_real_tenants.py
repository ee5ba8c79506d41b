"""Tenants of the whole real stack: pages and secrets that no other tenant sees, and a tenant's end.

One cluster of one prefill and one decode worker with a volume serves all tests of this file, in order.
"""

from __future__ import annotations

import base64
import json
import random
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.tiny_models import make_short_model
from support.local_machine import Machine, a_machine
from support.tier_chunks import chunk_files
from support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.model, pytest.mark.cluster]

MODEL = "SmolLM2-135M-Instruct"
PAGE = 32
NUM_SLOTS = 4
WORDS = ("ferry", "river", "boat", "harbour", "morning", "bridge", "stone", "water", "night", "captain", "rope", "sail")


@dataclass
class World:
    machine: Machine
    http: httpx.Client
    volume: Path
    usage: Path
    secrets: dict[str, str]  # texts that must be nowhere, by what they are
    keys: dict[str, str] = field(default_factory=dict)
    operators_key: str = ""

    def tenant(self, *arguments: str) -> str:
        ran = self.machine.run("tenant", *arguments)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def complete(self, tenant: str, prompt: str | list[int], *, apart: bool = False, **more: Any) -> dict[str, Any]:
        """`apart` computes the prompt on the prefill worker, however short."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
        headers = {
            "authorization": f"Bearer {self.keys[tenant]}",
            **({"x-kvferry-debug": "disaggregate"} if apart else {}),
        }
        answer = self.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        values: dict[str, Any] = answer.json()
        return values

    def stream(self, tenant: str, prompt: str, max_tokens: int, begun: list[str]) -> tuple[str, dict[str, Any]]:
        """Return the text and the last event. The first event adds the tenant to `begun`."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        text, last = "", {}
        with self.http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if not last:
                        begun.append(tenant)
                    last = json.loads(line[6:])
                    text += last["choices"][0]["text"] if last.get("choices") else ""
        return text, last

    def metrics(self) -> str:
        answer = self.http.get("/metrics", headers={"authorization": f"Bearer {self.operators_key}"})
        assert answer.status_code == 200
        return answer.text

    def metric(self, name: str) -> float:
        families = text_string_to_metric_families(self.metrics())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def chunks_of(self, tenant: str) -> list[Path]:
        return [file for file in chunk_files(self.volume) if tenant in str(file.relative_to(self.volume))]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tenants")
    salt_secret = secrets.token_hex(32)
    (folder / "salt").write_text(salt_secret)
    (folder / "salt").chmod(0o600)
    with a_machine("vllm") as machine:
        started = machine.up(
            "--no-ask",
            "--model", str(make_short_model(folder / MODEL)),
            "--set", "gateway.tenants_in_etcd=true",
            "--set", f"gateway.salt_secret_file={folder / 'salt'}",
            "--set", f"gateway.usage_dir={folder / 'usage'}",
            "--set", "tier.enabled=true",
            "--set", f"decode.engine.max_num_seqs={NUM_SLOTS}",
            "--set", f"tier.volumes=[{{path: {folder / 'volume'}, capacity_gib: 0.5}}]",
        )  # fmt: skip
        assert started.returncode == 0, started.stdout + started.stderr
        machine.prove()
        kept = {"the secret of salts": salt_secret}
        with httpx.Client(base_url=machine.url, timeout=PATIENCE_S, trust_env=False) as http:
            world = World(machine, http, folder / "volume", folder / "usage", kept)
            for name in ("acme", "beta", "doomed"):
                world.keys[name] = world.tenant("create", name, "--key", "ci").strip()
                kept[f"the key of {name}"] = world.keys[name]
            world.operators_key = world.tenant("key", "new", "acme", "ops", "--operator").strip()
            kept["the operators' key"] = world.operators_key
            wait_until(lambda: all(ready(world, name) for name in world.keys), what="tenants that are served")
            yield world


def ready(world: World, tenant: str) -> bool:
    answer = world.http.get("/v1/models", headers={"authorization": f"Bearer {world.keys[tenant]}"})
    return answer.status_code == 200


def text_of(seed: int, num_words: int = 200) -> str:
    chance = random.Random(seed)
    return " ".join(f"{chance.choice(WORDS)} {chance.randrange(1000)}" for _ in range(num_words // 2))


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def counts(world: World) -> tuple[dict[str, float], dict[str, float]]:
    """Return generated tokens by role, and prompt tokens that an engine's tiers had."""
    generated: dict[str, float] = {}
    hits: dict[str, float] = {}
    for family in text_string_to_metric_families(world.metrics()):
        for sample in family.samples:
            if sample.name == "kvferry_worker_generated_tokens_total":
                generated[sample.labels["role"]] = sample.value
            elif sample.name == "kvferry_worker_cached_prompt_tokens_total" and sample.labels["tier"] != "ferry":
                hits[sample.labels["role"]] = hits.get(sample.labels["role"], 0.0) + sample.value
    return generated, hits


def test_another_tenants_prompt_hits_on_neither_side_and_in_no_tier(world: World) -> None:
    prompt = text_of(10)

    def hits_of(tenant: str) -> tuple[int, dict[str, float]]:
        """Return hit tokens as the client sees them, and of both engines."""
        generated, hits = counts(world)
        answer = world.complete(tenant, prompt, apart=True, max_tokens=2, ignore_eos=True)
        wait_until(
            lambda: all(tokens > generated[role] for role, tokens in counts(world)[0].items()),
            what="the request in the counts of both workers",
        )
        return cached(answer), {role: tokens - hits[role] for role, tokens in counts(world)[1].items()}

    assert hits_of("acme") == (0, {"prefill": 0, "decode": 0})
    wait_until(lambda: len(world.chunks_of("acme")) > 0, what="its pages on the volume")
    assert hits_of("beta") == (0, {"prefill": 0, "decode": 0})
    shown, by_role = hits_of("acme")
    assert shown >= PAGE
    assert min(by_role.values()) >= PAGE, "the tenant itself hits on both sides"


def test_streams_above_a_share_give_way_and_go_on_without_a_difference(world: World) -> None:
    prompts = [text_of(40 + number, 60) for number in range(NUM_SLOTS + 2)]
    alone = [world.complete("acme", prompt, max_tokens=80, ignore_eos=True)["choices"][0]["text"] for prompt in prompts]
    begun: list[str] = []
    with ThreadPoolExecutor(len(prompts)) as threads:
        streams = [threads.submit(world.stream, "acme", prompt, 80, begun) for prompt in prompts]
        wait_until(lambda: len(begun) >= NUM_SLOTS, what="streams in all slots")
        world.complete("beta", text_of(60, 20), max_tokens=2)
        assert not any(each.done() for each in streams), "beta did not wait for an end of acme's"
        for text, each in zip(alone, streams, strict=True):
            assert each.result(timeout=PATIENCE_S)[0] == text
    assert world.metric("kvferry_preempted_requests_total") >= 1


def test_a_tenant_that_is_deleted_under_load_leaves_no_page_and_harms_no_other(world: World) -> None:
    prompt = text_of(30)
    expected = world.complete("acme", prompt, max_tokens=200, ignore_eos=True)["choices"][0]["text"]
    world.complete("doomed", prompt)
    wait_until(lambda: bool(world.chunks_of("doomed")), what="the tenant's pages on the volume")
    begun: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        doomed = [threads.submit(world.stream, "doomed", prompt, 4000, begun) for _ in range(2)]
        others = [threads.submit(world.stream, "acme", prompt, 200, begun) for _ in range(2)]
        wait_until(lambda: len(set(begun)) == 2, what="streams of both")
        told = world.machine.run("tenant", "delete", "doomed", "--yes")
        assert told.returncode == 0, told.stderr
        for ended in doomed:
            _, last = ended.result(timeout=PATIENCE_S)
            assert last["error"]["code"] == "invalid_api_key", last
        for ended in others:
            text, last = ended.result(timeout=PATIENCE_S)
            assert "error" not in last
            assert text == expected
    assert not ready(world, "doomed")
    wait_until(lambda: not world.chunks_of("doomed"), what="its chunks removed")
    assert world.chunks_of("acme"), "those of others stay"
    assert "removed" in told.stdout + told.stderr
    again = world.keys["doomed"] = world.tenant("create", "doomed", "--key", "ci").strip()
    world.secrets["the second key of doomed"] = again
    wait_until(lambda: ready(world, "doomed"), what="the new tenant of the name")
    assert cached(world.complete("doomed", prompt)) == 0


def test_no_secret_is_in_logs_metrics_records_or_status(world: World) -> None:
    world.machine.run("tenant", "key", "rotate", "acme", "ci", "next")
    refused = world.http.get("/v1/models", headers={"authorization": f"Bearer {world.keys['acme']}x"})
    assert refused.status_code == 401
    seen = {
        "the answer to a wrong key": refused.text,
        "status": (status := world.machine.run("status", "--json")).stdout + status.stderr,
        "tenant show": world.tenant("show", "acme"),
        "tenant list": world.tenant("list", "--json"),
        "metrics of the gateway": world.metrics(),
        "usage": world.tenant("usage", "--dir", str(world.usage)),
    }
    for member in json.loads(status.stdout)["members"]:
        if address := member.get("metrics_address"):
            seen[f"metrics of {member['member_id']}"] = httpx.get(f"http://{address}/metrics", timeout=PATIENCE_S).text
    assert "acme" in seen["usage"]
    assert len(seen) > 6, "workers and keepers have metrics of their own"
    forms = {what: forms_of(secret) for what, secret in world.secrets.items()}
    for where, text in seen.items():
        for what, texts in forms.items():
            assert not any(each in text.encode() for each in texts), f"{what} is in {where}"
    num_files = 0
    for folder in (world.machine.folder.path, world.usage, world.volume):
        # etcd's data holds hashes of keys, and no key; the secret of salts comes from a file here.
        for file in folder.rglob("*"):
            if file.is_file() and file.stat().st_size < 64 << 20:
                content = file.read_bytes()
                num_files += 1
                for what, texts in forms.items():
                    assert not any(each in content for each in texts), f"{what} is in {file}"
    assert num_files > 20
    assert any("gateway" in file.name or "ray" in str(file) for file in world.machine.folder.path.rglob("*.log"))


def forms_of(secret: str) -> list[bytes]:
    plain = secret.encode()
    forms = [plain, base64.b64encode(plain).rstrip(b"="), plain.hex().encode()]
    if all(each in "0123456789abcdef" for each in secret):
        raw = bytes.fromhex(secret)
        forms += [raw, base64.b64encode(raw).rstrip(b"=")]
    return forms
