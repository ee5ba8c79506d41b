"""What `kvferry prove` and `kvferry status` say of transfers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from kvferry import config as configuration
from kvferry.cli import main
from kvferry.errors import ConfigError, LocalError
from kvferry.membership.base import Member, MemberId, MemberKind, Record
from kvferry.proof.certificates import FOLDER, Certificate, Certificates, Way, key_of, kind_of
from kvferry.proof.verdict import Distances, Outcome, View
from kvferry_local import commands, proofs
from kvferry_local.proofs import PENDING, UNDER_WAY, ProofStatus, bars, proofs_of
from kvferry_local.status import ClusterStatus
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import SOON_S

DISTANCES = (
    Distances(0, 20, View.DIRECT, 0.5, 0.25, (4.0, 2.0)),
    Distances(1, 161, View.HELD, 0.125, 0.0, (8.0,)),
)


def a_member(kind: MemberKind, device: str = "a device", pool: str = "", **values: Any) -> Member:
    known = {"address": "a:1", "model": "/models/m", "version": "1.0", "exchange_digest": "e", "block_size": 16}
    return Member(kind=kind, member_id=MemberId(f"{kind}-{device}"), device=device, pool=pool, **{**known, **values})


PREFILL, DECODE = a_member(MemberKind.PREFILL), a_member(MemberKind.DECODE)


def a_certificate(decode: Member = DECODE, **values: Any) -> Certificate:
    known: dict[str, Any] = {"outcome": Outcome.PROVEN, "unix_s": time.time(), "distances": DISTANCES, "took_s": 2.0}
    return Certificate(prefill=kind_of(PREFILL), decode=kind_of(decode), way=Way.TRANSFER, **{**known, **values})


def a_config(**engine: Any) -> configuration.ClusterConfig:
    return configuration.parse({"model": {"path": "m"}, "pools": {"fast": {}}, "engine": engine})


def of(*certificates: Certificate, members: tuple[Member, ...] = (PREFILL, DECODE), **engine: Any) -> list[ProofStatus]:
    records = {each.key: Record(Certificates(None).encode(each), 1) for each in certificates}
    return list(proofs_of(a_config(**engine), members, records))


# Status


def test_a_way_is_pending_under_way_or_has_a_result() -> None:
    (pending,) = of()
    assert (pending.outcome, pending.is_proven, pending.distance) == (PENDING, False, None)
    (under_way,) = of(a_certificate(outcome=Outcome.UNDECIDED, claimed_by="g"))
    assert (under_way.outcome, under_way.is_proven) == (UNDER_WAY, False)
    (proven,) = of(a_certificate())
    assert (proven.outcome, proven.is_proven, proven.model) == ("proven", True, "m")
    assert (proven.distance, proven.wrong_from, proven.took_s) == (0.5, 2.0, 2.0)
    (retried,) = of(a_certificate(outcome=Outcome.UNDECIDED, unix_s=0.0, reason="a worker is full"))
    assert retried.outcome == PENDING
    assert "a worker is full" in retried.line()
    (again,) = of(a_certificate(claimed_by="g"))
    assert again.is_proven, "until there is another result"
    (refuted,) = of(a_certificate(outcome=Outcome.REFUTED, reason="it is far away"))
    assert (refuted.outcome, refuted.is_proven, refuted.reason) == ("refuted", False, "it is far away")


def test_a_line_says_devices_and_distances_and_why_not() -> None:
    (proven,) = of(a_certificate(reason="left out"))
    line = proven.line()
    assert all(text in line for text in ("proven", "a device", "0.5", "2"))
    assert "left out" not in line
    (refuted,) = of(a_certificate(outcome=Outcome.REFUTED, reason="it is far away"))
    assert "it is far away" in refuted.line()
    other = a_member(MemberKind.DECODE, "another device", pool="fast")
    (pending,) = of(members=(a_member(MemberKind.PREFILL, pool="fast"), other))
    assert all(text in pending.line() for text in ("a device to another device", "pool fast", PENDING))
    assert "unknown" in of(members=(a_member(MemberKind.PREFILL, ""), a_member(MemberKind.DECODE, "")))[0].line()


def test_names_and_reasons_cannot_write_lines_of_their_own() -> None:
    bad = "a\nb\x1b[2J"
    (refuted,) = of(a_certificate(outcome=Outcome.REFUTED, reason=bad))
    (pending,) = of(members=(a_member(MemberKind.PREFILL, bad), a_member(MemberKind.DECODE, bad)))
    assert refuted.line().isprintable()
    assert pending.line().isprintable()


def test_one_line_for_each_kind_of_way() -> None:
    other = a_member(MemberKind.DECODE, "another device")
    members = (PREFILL, DECODE, DECODE, other, a_member(MemberKind.PREFILL))
    assert [(each.prefill_device, each.decode_device) for each in of(members=members)] == [
        ("a device", "a device"),
        ("a device", "another device"),
    ]
    (one, two) = of(a_certificate(other), members=(PREFILL, DECODE, other))
    assert (one.outcome, two.outcome) == (PENDING, "proven")


@pytest.mark.parametrize(
    "decode",
    [
        a_member(MemberKind.DECODE, exchange_digest="f"),
        a_member(MemberKind.DECODE, pool="fast"),
        a_member(MemberKind.PREFILL),
        a_member(MemberKind.KEEPER),
    ],
    ids=["other pages", "another pool", "another prefill worker", "a keeper"],
)
def test_what_is_no_way_is_not_shown(decode: Member) -> None:
    assert of(members=(PREFILL, decode)) == []


@pytest.mark.parametrize(
    ("engine", "is_shown"),
    [({}, True), ({"proof": "report"}, True), ({"proof": "off"}, False), ({"kind": "sim"}, False)],
    ids=str,
)
def test_what_nobody_proves_is_not_shown(engine: dict[str, Any], is_shown: bool) -> None:
    # `kvferry prove` would wait for it.
    assert bool(of(**engine)) is is_shown


def test_each_model_and_pool_has_a_setting_of_its_own() -> None:
    models = [{"name": name, "model": {"path": "/x"}, "engine": {"proof": name}} for name in ("report", "off")]
    config = configuration.parse({"model": {"path": "m"}, "engine": {"proof": "off"}, "models": models})
    pools = ("", "gone", *(config.entry(name).pool for name in ("report", "off")))
    members = [
        a_member(kind, pool=pool, exchange_digest=pool)
        for pool in pools
        for kind in (MemberKind.PREFILL, MemberKind.DECODE)
    ]
    assert [each.pool for each in proofs_of(config, members, {})] == ["gone", "report"]


def test_a_record_of_another_cluster_is_pending(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    config = configuration.parse({"model": {"path": "m"}, "gateway": {"salt_secret_file": str(secret)}})
    certificate = a_certificate()
    for written_with, outcome in ((b"", PENDING), (b"x" * 32, PENDING), (b"s" * 32, "proven")):
        records = {certificate.key: Record(Certificates(None, written_with).encode(certificate), 1)}
        (found,) = proofs_of(config, (PREFILL, DECODE), records)
        assert found.outcome == outcome


def test_bars_are_as_long_as_distances() -> None:
    lengths = [line.count("#") for line in bars(of(a_certificate())[0])]
    assert lengths == [round(24 * value / 8.0) for value in (0.5, 0.25, 4.0, 2.0, 0.125, 0.0, 8.0)]
    assert list(bars(of()[0])) == []
    huge = Distances(0, 20, View.DIRECT, 1e308, 0.0, ())
    assert [line.count("#") for line in bars(of(a_certificate(distances=(huge,)))[0])] == [24, 0]
    nothing = Distances(0, 20, View.DIRECT, 0.0, 0.0, ())
    assert [line.count("#") for line in bars(of(a_certificate(distances=(nothing,)))[0])] == [0, 0]


def seen(*found: ProofStatus) -> ClusterStatus:
    return ClusterStatus(
        name="c",
        url="",
        alive=True,
        uptime_s=1.0,
        engine="vllm",
        model="m",
        etcd_endpoints=(),
        members=(),
        proofs=found,
    )


def test_status_shows_proofs_as_lines_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of(a_certificate())
    monkeypatch.setattr(commands, "look", lambda folder: seen(*found))
    monkeypatch.setenv("KVFERRY_RUN_DIR", "/tmp/kvf-test-proofs-absent")
    assert found[0].line() in CliRunner().invoke(main, ["status"]).output.splitlines()
    result = CliRunner().invoke(main, ["status", "--json"])
    assert result.exit_code == 0, result.output
    (proof,) = json.loads(result.stdout)["proofs"]
    assert (proof["outcome"], proof["distances"][0]["transferred"]) == ("proven", 0.5)


# `kvferry prove`


def prove(monkeypatch: pytest.MonkeyPatch, found: list[ProofStatus] | Exception, *words: str) -> Result:
    async def proved(
        config: Any, *, again: bool, timeout_s: float, on_progress: Callable[[str], None]
    ) -> tuple[ProofStatus, ...]:
        on_progress("transfer pending")
        assert (again, timeout_s) == ("--again" in words, 7.0 if "--timeout" in words else 600.0)
        if isinstance(found, Exception):
            raise found
        return tuple(found)

    monkeypatch.setattr(proofs, "prove", proved)
    monkeypatch.setenv("KVFERRY_RUN_DIR", "/tmp/kvf-test-proofs-absent")
    return CliRunner().invoke(main, ["prove", "--etcd", "127.0.0.1:1", *words])


def test_without_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_RUN_DIR", "/tmp/kvf-test-proofs-absent")
    result = CliRunner().invoke(main, ["prove"])
    assert result.exit_code == 1
    assert result.stderr.startswith("kvferry: no cluster runs here")


def test_pages_that_are_transferred_without_a_proof_are_not_said_to_be_computed() -> None:
    refuted = a_certificate(outcome=Outcome.REFUTED, reason="they are far")
    (computed,), (transferred,) = of(refuted), of(refuted, proof="report")
    assert computed.line().endswith("decode workers compute prompts: they are far")
    assert transferred.line().endswith("pages are transferred (engine.proof: report), though they are far")


def test_the_exit_code_is_0_only_if_all_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = of(a_certificate()), of(a_certificate(outcome=Outcome.UNDECIDED, reason="too busy"))
    result = prove(monkeypatch, good, "--again", "--timeout", "7")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [good[0].line(), *bars(good[0])]
    for found in (bad, [*good, *bad], [*bad, *good]):
        result = prove(monkeypatch, found)
        assert result.exit_code == 1
        assert "too busy" in result.stdout
        assert result.stderr.splitlines()[-1].startswith("kvferry: ")
    result = prove(monkeypatch, [])
    assert (result.exit_code, result.stdout) == (1, "")
    result = prove(monkeypatch, LocalError("no result"))
    assert (result.exit_code, result.stderr) == (1, "transfer pending\nkvferry: no result\n")
    assert prove(monkeypatch, good, "--timeout", "0").exit_code == 2


def test_the_output_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    result = prove(monkeypatch, of(a_certificate(outcome=Outcome.REFUTED)), "--json")
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)
    assert (found["outcome"], found["way"], found["distance"]) == ("refuted", "transfer", 0.5)
    assert found["distances"][1]["view"] == "held"


class Cluster:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = MemoryRegistry()
        self.config = a_config()
        self.lines: list[str] = []
        monkeypatch.setattr(proofs, "EtcdMembership", lambda config: MemoryMembership(self.registry))
        monkeypatch.setattr(proofs, "_POLL_S", 0.001)

    async def register(self, *members: Member) -> None:
        for member in members or (PREFILL, DECODE, a_member(MemberKind.GATEWAY)):
            await MemoryMembership(self.registry).register(member)

    @property
    def name(self) -> str:
        return f"{FOLDER}/{key_of(kind_of(PREFILL), kind_of(DECODE), Way.TRANSFER)}"

    def write(self, certificate: Certificate) -> None:
        before = self.registry._records.get(self.name)
        value = Certificates(None).encode(certificate)
        assert self.registry._write_record(self.name, value, before.revision if before is not None else 0)

    def proving(self, *, again: bool = False, timeout_s: float = SOON_S) -> asyncio.Task[tuple[ProofStatus, ...]]:
        proving = proofs.prove(self.config, again=again, timeout_s=timeout_s, on_progress=self.lines.append)
        return asyncio.create_task(proving)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


async def test_it_waits_for_a_result(cluster: Cluster) -> None:
    await cluster.register()
    proving = cluster.proving()
    undecided = a_certificate(outcome=Outcome.UNDECIDED, unix_s=0.0)
    for step in (None, structs.replace(undecided, claimed_by="g"), undecided):
        if step is not None:
            cluster.write(step)
        await asyncio.sleep(0.02)
        assert not proving.done()
    cluster.write(a_certificate(outcome=Outcome.REFUTED))
    (found,) = await proving
    assert found.outcome == "refuted"
    assert [line.split()[1] for line in cluster.lines] == ["pending", "under", "pending"], "and the distances before"


async def test_what_has_a_result_is_not_waited_for(cluster: Cluster) -> None:
    await cluster.register()
    cluster.write(a_certificate(unix_s=1.0))
    (found,) = await cluster.proving()
    assert found.is_proven


@pytest.mark.parametrize("late_s", [0.0, 3600.0], ids=["clocks agree", "those of gateways are late"])
async def test_again_deletes_the_record_and_waits_for_another_one(cluster: Cluster, late_s: float) -> None:
    await cluster.register()
    earlier = a_certificate(unix_s=time.time() - late_s - 100)
    cluster.write(earlier)
    proving = cluster.proving(again=True)
    await asyncio.sleep(0.02)
    assert cluster.name not in cluster.registry._records
    cluster.write(earlier)  # from the cache of a gateway that did not hear of it
    await asyncio.sleep(0.02)
    assert not proving.done()
    cluster.write(a_certificate(unix_s=time.time() - late_s, took_s=3.0))
    (found,) = await proving
    assert found.took_s == 3.0


@pytest.mark.parametrize("delay_s", [0.0, SOON_S], ids=["no result", "a slow registry"])
async def test_it_ends_in_time(cluster: Cluster, delay_s: float) -> None:
    await cluster.register()
    cluster.registry.delay_s = delay_s
    with pytest.raises(LocalError, match=r"0\.05 s"):
        await cluster.proving(timeout_s=0.05)


async def test_without_the_secret_it_does_not_wait_for_records_that_it_cannot_read(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.config = configuration.parse({"model": {"path": "m"}, "gateway": {"salt_secret_file": str(tmp_path / "s")}})
    await cluster.register()
    with pytest.raises(ConfigError, match="salt_secret_file"):
        await cluster.proving()


async def test_without_ways_there_is_nothing_to_wait_for(cluster: Cluster) -> None:
    assert await cluster.proving() == ()


async def test_without_a_gateway_it_does_not_wait(cluster: Cluster) -> None:
    await cluster.register(PREFILL, DECODE)
    with pytest.raises(LocalError, match="no gateway is registered"):
        await cluster.proving()
    cluster.write(a_certificate())
    assert [each.is_proven for each in await cluster.proving()] == [True], "an earlier one had proven it"
