"""What a gateway says of transfers, and does, before they are proven."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import pytest_asyncio
from msgspec import structs

from kvferry import config as configuration
from kvferry.config.engine import EngineConfig, Proof
from kvferry.errors import ConfigError
from kvferry.gateway.identity.key_file import new_key
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.gateway.models import GatewayModel
from kvferry.membership.base import Member, MemberKind
from kvferry.proof.certificates import FOLDER, Certificate, Certificates, EngineKind, Way, kind_of
from kvferry.proof.prover import Prover
from kvferry.proof.verdict import Distances, Outcome, View
from kvferry.worker.lifecycle import WorkerHost, build_engine
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import SOON_S, until

MODEL = "sim-model"
START = Callable[..., Awaitable["Simulated"]]


class Simulated:
    """A gateway with simulated engines, whose transfers it treats as those of real ones. Nothing proves them."""

    def __init__(self, registry: MemoryRegistry, gateway: GatewayHost, keys: dict[str, str]) -> None:
        self.registry, self.gateway, self._keys = registry, gateway, keys

    @property
    def kinds(self) -> tuple[EngineKind, EngineKind]:
        pool = self.gateway.worker_pool
        prefill, decode = (pool.usable(kind)[0].member for kind in (MemberKind.PREFILL, MemberKind.DECODE))
        return kind_of(prefill), kind_of(decode)

    async def write(
        self, outcome: Outcome, way: Way = Way.TRANSFER, transferred: float = 0.25, reason: str = ""
    ) -> None:
        prefill, decode = self.kinds
        certificate = Certificate(
            prefill=prefill,
            decode=decode,
            way=way,
            outcome=outcome,
            reason=reason,
            unix_s=time.time(),
            distances=(Distances(0, 20, View.DIRECT, transferred, 0.1, (3.0,)),),
        )
        name = f"{FOLDER}/{certificate.key}"
        before = self.registry._records.get(name)
        self.registry._write_record(name, Certificates(None).encode(certificate), before.revision if before else 0)
        prover = self.gateway.prover
        await until(lambda: prover._known.get(certificate.key) == certificate, within_s=SOON_S)

    async def get(self, path: str, client: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {self._keys[client]}"} if client else {}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.gateway.port}", headers=headers) as http:
            return await http.get(path)

    async def metric(self, name: str) -> list[str]:
        text = (await self.get("/metrics", "ops" if self._keys else "")).text
        return sorted(line for line in text.splitlines() if line.startswith(name))

    async def complete(self) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": "w " * 200, "max_tokens": 2}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.gateway.port}") as http:
            answer = await http.post("/v1/completions", json=body, headers={"x-kvferry-debug": "1"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["kvferry"]
        return found


@pytest_asyncio.fixture
async def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[START]:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))

    async def nothing(prover: Prover) -> None:
        return

    monkeypatch.setattr(Prover, "_prove_all", nothing)
    async with AsyncExitStack() as stack:

        async def started(proof: Proof | None = "required", *, has_keys: bool = False) -> Simulated:
            """`proof` None: what a simulated engine has by itself."""
            if proof is not None:
                monkeypatch.setattr(EngineConfig, "needed_proof", proof)
            keys = {}
            if has_keys:
                file = tmp_path / "keys.yaml"
                keys = {"ci": new_key(file, "acme", "ci"), "ops": new_key(file, "acme", "ops", operator=True)}
            config = configuration.parse(
                {
                    "model": {"served_name": MODEL},
                    "engine": {"kind": "sim", "block_size": 16},
                    "gateway": {
                        "http_port": 0,
                        "grpc_port": None,
                        "placement": "round_robin",
                        **({"keys_file": str(file)} if has_keys else {}),
                    },
                    "sim": {"step_ms": 0, "prefill_tokens_per_s": 1_000_000},
                }
            )
            registry = MemoryRegistry()
            for kind in (MemberKind.PREFILL, MemberKind.DECODE):
                worker = WorkerHost(config, kind, build_engine(config, kind, MODEL), MemoryMembership(registry))
                stack.push_async_callback(worker.stop)
                await worker.start()
            gateway = GatewayHost(config, MODEL, MemoryMembership(registry))
            stack.push_async_callback(gateway.stop)
            await gateway.start()
            await until(lambda: len(gateway.readiness().members) == 2, within_s=SOON_S)
            return Simulated(registry, gateway, keys)

        yield started


async def test_readyz_names_what_is_not_proven_until_it_is(start: START) -> None:
    simulated = await start()
    (pending,) = (await simulated.get("/readyz")).json()["unproven"]
    assert "not proven yet" in pending
    await simulated.write(Outcome.REFUTED, reason="it is far away")
    answer = await simulated.get("/readyz")
    (refuted,) = answer.json()["unproven"]
    assert "it is far away" in refuted
    assert (answer.status_code, answer.json()["ready"]) == (200, True), "decode workers compute prompts"
    await simulated.write(Outcome.PROVEN)
    assert (await simulated.get("/readyz")).json()["unproven"] == []


async def test_readyz_names_engines_without_the_tiers_that_are_configured(
    start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = WorkerHost.member.fget
    assert made is not None

    def without_tiers(host: WorkerHost) -> Member:
        return structs.replace(made(host), without_tiers="a sliding window")

    monkeypatch.setattr(WorkerHost, "member", property(without_tiers))
    simulated = await start("off")
    (decode,) = simulated.gateway.worker_pool.usable(MemberKind.DECODE)
    answer = (await simulated.get("/readyz")).json()
    assert answer["unproven"] == [f"tiers of {decode.member.member_id}: a sliding window"]


async def test_readyz_names_it_to_operators_alone(start: START) -> None:
    simulated = await start(has_keys=True)
    of_clients = {client: (await simulated.get("/readyz", client)).json() for client in ("ops", "ci", "")}
    assert {client: bool(answer["unproven"]) for client, answer in of_clients.items()} == {
        "ops": True,
        "ci": False,
        "": False,
    }
    assert all(answer["ready"] for answer in of_clients.values())


async def test_metrics_of_proofs(start: START) -> None:
    simulated = await start()
    labels = '{pool="default",way="transfer"}'
    assert await simulated.metric("kvferry_transfer_proven{") == [f"kvferry_transfer_proven{labels} 0.0"]
    assert await simulated.metric("kvferry_transfer_proof_distance{") == [], "nothing was measured"
    # A way that no workers have is not one that is unproven.
    for outcome, value in ((Outcome.UNDECIDED, 0.0), (Outcome.REFUTED, 0.0), (Outcome.PROVEN, 1.0)):
        await simulated.write(outcome, transferred=0.5 + value)
        assert await simulated.metric("kvferry_transfer_proven{") == [f"kvferry_transfer_proven{labels} {value}"]
        assert await simulated.metric("kvferry_transfer_proof_distance{") == [
            f"kvferry_transfer_proof_distance{labels} {0.5 + value}"
        ]


async def test_a_pool_is_proven_only_if_all_of_its_ways_are(start: START, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = await start()
    await simulated.write(Outcome.PROVEN)
    results = list(simulated.gateway.prover.results())
    ((subject, proven),) = results
    for others in ([(subject, None)], [(subject, proven)]):
        for both in (results + others, others + results):
            monkeypatch.setattr(simulated.gateway.prover, "results", lambda both=both: iter(both))
            (sample,) = simulated.gateway._sample_proofs()
            assert sample.is_proven is (others[0][1] is not None)
            assert sample.distance == 0.25


async def test_requests_are_ferried_once_it_is_proven(start: START) -> None:
    simulated = await start()
    record = await simulated.complete()
    assert (record["reason"], record["prefill_worker"], record["ferried_pages"]) == ("unproven", None, 0)
    await simulated.write(Outcome.PROVEN, Way.ADAPTER)
    assert (await simulated.complete())["reason"] == "unproven", "that was another way"
    await simulated.write(Outcome.PROVEN)
    record = await simulated.complete()
    assert record["reason"] == "disaggregated"
    assert record["ferried_pages"] > 0


async def test_where_proofs_are_only_reported_all_is_ferried(start: START) -> None:
    simulated = await start("report")
    assert (await simulated.complete())["reason"] == "disaggregated"
    assert len((await simulated.get("/readyz")).json()["unproven"]) == 1
    assert len(await simulated.metric("kvferry_transfer_proven{")) == 1


@pytest.mark.parametrize("proof", ["off", None], ids=["off", "of simulated engines"])
async def test_where_proofs_are_off_none_is_missing(start: START, proof: Proof | None) -> None:
    simulated = await start(proof)
    assert (await simulated.complete())["reason"] == "disaggregated"
    assert (await simulated.get("/readyz")).json()["unproven"] == []
    assert await simulated.metric("kvferry_transfer_proven{") == []


@pytest.mark.parametrize("kind", ["vllm", "sim"])
@pytest.mark.parametrize("value", [None, *get_args(Proof)])
def test_the_setting(kind: str, value: Proof | None) -> None:
    engine: dict[str, Any] = {"kind": kind, **({"proof": value} if value else {})}
    own = GatewayModel("", configuration.parse({"model": {"path": "m"}, "engine": engine}), "m")
    assert own.proofs[""] == ("off" if kind == "sim" else value or "required")


@pytest.mark.parametrize("written", ["off", "'off'"])
def test_off_is_off_as_yaml_reads_it(written: str, tmp_path: Path) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text(f"model: {{path: m}}\nengine: {{proof: {written}}}\n")
    assert configuration.load(file).engine.proof == "off"


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="proof"):
        configuration.parse({"model": {"path": "m"}, "engine": {"proof": "maybe"}})
