"""The commands `kvferry tenant`, against a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from bench.etcd_server import EtcdServer, find_binary
from kvferry.cli import main
from kvferry.config import MembershipConfig
from kvferry.errors import UnavailableError
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.membership.etcd import EtcdMembership

pytestmark = pytest.mark.skipif(find_binary() is None, reason="no etcd binary")

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def cluster(server: EtcdServer) -> MembershipConfig:
    return MembershipConfig(endpoints=(server.endpoint,), prefix=f"/test/{uuid.uuid4().hex}/clusters/kvferry")


@pytest.fixture
def run(cluster: MembershipConfig, tmp_path: Path) -> Run:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"membership": {"endpoints": cluster.endpoints, "prefix": cluster.prefix}}))

    def run(*arguments: str, text: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(main, ["tenant", *arguments, "--config", str(file)], input=text)
        assert "Traceback" not in result.output
        return result

    return run


@pytest.mark.parametrize("reads_tenants", [False, True])
def test_commands_warn_where_the_gateways_of_a_local_cluster_do_not_read_tenants(
    cluster: MembershipConfig, monkeypatch: pytest.MonkeyPatch, reads_tenants: bool
) -> None:
    config = {
        "membership": {"endpoints": cluster.endpoints, "prefix": cluster.prefix},
        "gateway": {"tenants_in_etcd": reads_tenants},
    }
    folder = SimpleNamespace(record=lambda: SimpleNamespace(config=config))
    monkeypatch.setattr("kvferry.util.satellites.named_folder", lambda: lambda name, default: folder)
    made = CliRunner().invoke(main, ["tenant", "create", "acme", "--key", "ci"])
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("kvf_")
    assert ("warning: the gateways of this cluster do not read tenants" in made.stderr) is not reads_tenants


def test_a_tenants_life(run: Run) -> None:
    made = run("create", "acme", "--key", "ci")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key.startswith("kvf_")
    assert len(key.split()) == 1, "only the key, so that a script can take it"
    shown = json.loads(run("show", "acme", "--json").stdout)
    assert shown["keys"][0]["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert key not in json.dumps(shown)
    other = run("key", "new", "acme", "web", "--expires", "90d", "--operator", "--group", "web").stdout.strip()
    assert other.startswith("kvf_")
    assert run("key", "rotate", "acme", "ci", "ci2", "--overlap", "1h").stdout.startswith("kvf_")
    assert run("key", "rotate", "acme", "web", "web2").exit_code == 2, "it has an end"
    assert run("key", "rotate", "acme", "web", "web2", "--expires", "never").stdout.startswith("kvf_")
    table = run("show", "acme").stdout
    for said in ("ci", "ci2", "web", "never", "UTC", "yes"):
        assert said in table
    assert run("set", "acme", "--class", "premium").stdout == "tenant acme has class premium, share 4\n"
    assert run("set", "acme", "--share", "2").stdout == "tenant acme has class premium, share 2\n"
    assert "premium" in run("list").stdout
    assert run("set", "acme", "--class-share").stdout == "tenant acme has class premium, share 4\n"
    for arguments in ((), ("--class", "gold"), ("--share", "0"), ("--share", "2", "--class-share")):
        assert run("set", "acme", *arguments).exit_code == 2
    told = run("set-limits", "acme", "--requests-per-minute", "600", "--max-choices", "8").stdout
    assert told == "tenant acme: requests_per_minute 600, tokens_per_minute none, max_choices 8\n"
    assert "max_choices 8" in run("show", "acme").stdout
    assert "max_choices none" in run("set-limits", "acme", "--max-choices", "none").stdout
    for arguments in ((), ("--max-choices", "1.5"), ("--tokens-per-minute", "-1"), ("--tokens-per-minute", "nan")):
        assert run("set-limits", "acme", *arguments).exit_code == 2
    told = run("set-tier", "acme", "volume", "--floor", "0.2", "--ttl", "2h", "--no-borrow").stdout
    assert told == "tenant acme in the volume tier: floor 0.2, cap 0.75, floor only, ttl 7200 s\n"
    assert "volume tier: floor 0.2" in run("show", "acme").stdout
    assert json.loads(run("show", "acme", "--json").stdout)["tiers"]["volume"]["floor"] == 0.2
    for arguments in ((), ("--floor", "2"), ("--ttl", "soon"), ("--ttl", "0s"), ("--of-class", "--cap", "0.5")):
        assert run("set-tier", "acme", "volume", *arguments).exit_code == 2
    assert "floor 0, cap 0.75" in run("set-tier", "acme", "volume", "--of-class").stdout
    assert run("key", "revoke", "acme", "ci").exit_code == 0
    epoch = json.loads(run("show", "acme", "--json").stdout)["epoch"]
    told = run("reset-pages", "acme").stdout
    assert int(told.removeprefix("tenant acme has epoch ")) > epoch
    assert [entry["name"] for entry in json.loads(run("list", "--json").stdout)] == ["acme"]
    assert "acme" in run("list").stdout
    assert run("delete", "acme", text="n\n").exit_code == 1
    assert run("show", "acme").exit_code == 0, "it was asked and answered no"
    assert run("delete", "acme", "--yes").exit_code == 0
    assert json.loads(run("list", "--json").stdout) == []
    assert "acme" in run("list", "--deleted").stdout
    assert "acme" not in run("list").stdout
    assert run("forget", "acme").stdout == "forgot tenant acme\n"
    assert "acme" not in run("list", "--deleted").stdout
    assert run("forget", "acme").exit_code == 2
    assert run("create", "acme").exit_code == 0
    assert json.loads(run("show", "acme", "--json").stdout)["epoch"] > epoch


def test_a_file_is_applied_after_a_look(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(
        "- name: acme\n  keys:\n"
        f"  - {{name: ci, sha256: '{'1' * 64}', expires: 2099-01-01T00:00:00Z}}\n"
        f"  - {{name: web, sha256: '{'2' * 64}', operator: true, group: web}}\n"
        "- {name: beta, limits: {tokens_per_minute: 1000}, tiers: {volume: {floor: 0.2, ttl: never}}}\n"
    )
    assert "acme: + key ci" in run("apply", "-f", str(file), "--dry-run").stdout
    assert json.loads(run("list", "--json").stdout) == []
    assert run("apply", "-f", str(file)).exit_code == 0
    assert run("apply", "-f", str(file)).stdout == "nothing to change\n"
    beta = json.loads(run("show", "beta", "--json").stdout)
    assert beta["limits"] == {"requests_per_minute": None, "tokens_per_minute": 1000.0, "max_choices": None}
    terms = beta["tiers"]["volume"]
    assert terms == {"floor": 0.2, "cap": 0.5, "borrow": True, "ttl_s": None}
    keys = json.loads(run("show", "acme", "--json").stdout)["keys"]
    assert [(key["name"], key.get("expires_unix_s")) for key in keys] == [("ci", 4070908800.0), ("web", None)]
    assert "beta: - tenant" in run("apply", "-f", "-", "--prune", text="[{name: acme}]").stdout
    assert [entry["name"] for entry in json.loads(run("list", "--json").stdout)] == ["acme"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not YAML"),
        ("name: acme", "a list"),
        ("- acme", "entry 1"),
        ("- {name: acme, weight: 4}", "weight"),
        ("- {name: acme, class: gold}", "class"),
        ("- {name: acme, share: 0}", "share"),
        ("- {name: Acme}", "entry 1"),
        ("- {name: acme, limits: {max_choices: 0}}", "entry 1: max_choices 0"),
        ("- {name: acme, limits: {per_day: 1}}", "entry 1"),
        ("- {name: acme, tiers: {tape: {floor: 0.5}}}", "entry 1: tier 'tape'"),
        ("- {name: acme, tiers: {volume: {floor: 0.5, size: 1}}}", "size"),
        ("- {name: acme, tiers: {volume: {ttl: 5}}}", "entry 1"),
        ("- {name: acme, tiers: {volume: {ttl: soon}}}", "entry 1: 'soon'"),
        ("- {name: acme, tiers: {volume: {floor: 0.9}}}", "below the floor"),
        ("- {name: a}\n- {name: a}", "entry 2"),
        ("- {name: a, keys: [{name: k}]}", "sha256"),
        ("- {name: a, keys: [{name: k, sha256: 12}]}", "entry 1"),
        (f"- {{name: a, keys: [{{name: k, sha256: '{'g' * 64}'}}]}}", "64 hexadecimal"),
        (f"- {{name: a, keys: [{{name: k, sha256: '{'0' * 64}', expires: soon}}]}}", "entry 1"),
        ("[" * 200_000, "nested deeper than 16"),
        (b"- {name: \xff}", "not YAML"),
        ("- &a {name: acme}\n- *a", "alias"),
        (f"- {{name: a, keys: [{{name: k, sha256: '{'0' * 64}', expires: 2027-02-30}}]}}", "RFC3339"),
        (f"- {{name: a, keys: [{{name: k, sha256: '{'0' * 64}', expires: 2027-02-03T04:05:06}}]}}", "timezone"),
        (f"- {{name: a, keys: [{{name: k, sha256: '{'0' * 64}'}}, {{name: l, sha256: '{'0' * 64}'}}]}}", "one key"),
    ],
)
def test_a_file_that_says_something_else_is_refused_and_changes_nothing(run: Run, text: str | bytes, said: str) -> None:
    result = run("apply", "-f", "-", text=text)
    assert result.exit_code == 2
    assert said in result.stderr
    assert json.loads(run("list", "--json").stdout) == []


def test_what_makes_no_sense_is_refused_by_name(run: Run) -> None:
    for arguments in (("show", "acme"), ("delete", "acme", "--yes"), ("key", "new", "acme", "ci")):
        result = run(*arguments)
        assert (result.exit_code, result.stderr) == (2, "kvferry: there is no tenant 'acme'\n")
    run("create", "acme")
    assert "age" not in run("key", "new", "acme", "ci", "--expires", "90d").stderr
    for age in ("soon", "-1d", "1w", "9999999d", ""):
        assert run("key", "new", "acme", "x", "--expires", age).exit_code == 2
    assert run("apply", "-f", "/absent.yaml").exit_code == 2


def test_a_tenant_is_not_made_where_its_key_cannot_be(run: Run) -> None:
    result = run("create", "acme", "--key", "bad name")
    assert result.exit_code == 2
    assert "--key: name 'bad name'" in result.stderr
    assert json.loads(run("list", "--json").stdout) == []


def test_names_that_are_no_text_are_refused(run: Run) -> None:
    for arguments in (("show", "\udcff\udcfe"), ("create", "\udcff"), ("delete", "a/../b", "--yes"), ("forget", "A")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "lower-case letters" in result.stderr


async def test_a_record_that_cannot_be_read_is_listed_and_deleted(run: Run, cluster: MembershipConfig) -> None:
    membership = EtcdMembership(cluster)
    await membership.records.write("tenants/torn", b"{", 0)
    await membership.close()
    listed = await asyncio.to_thread(run, "list")
    assert (listed.exit_code, "'torn' cannot be read" in listed.stderr) == (0, True)
    assert (await asyncio.to_thread(run, "delete", "torn", "--yes")).exit_code == 0
    assert (await asyncio.to_thread(run, "list")).stderr == ""


def test_a_name_chooses_the_cluster_of_an_etcd_of_several(server: EtcdServer) -> None:
    def tenants(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["tenant", *arguments, "--etcd", server.endpoint])

    assert tenants("create", "acme", "--name", "blue").exit_code == 0
    # A cluster may have the name of a folder in another's part of etcd.
    assert tenants("create", "of-tenants", "--name", "tenants").exit_code == 0
    listed = {name: tenants("list", "--json", "--name", name) for name in ("blue", "tenants", "kvferry")}
    assert {result.stderr for result in listed.values()} == {""}
    names = {cluster: [each["name"] for each in json.loads(result.stdout)] for cluster, result in listed.items()}
    assert names == {"blue": ["acme"], "tenants": ["of-tenants"], "kvferry": []}


def test_without_an_etcd_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"membership": {"endpoints": ["127.0.0.1:1"]}}))
    result = CliRunner().invoke(main, ["tenant", "list", "--config", str(file)])
    assert result.exit_code == 1
    assert "the registry cannot be reached" in result.stderr
    result = CliRunner().invoke(main, ["tenant", "list", "--name", "absent"])
    assert result.exit_code == 2
    assert "--etcd" in result.stderr


async def test_a_full_etcd_is_the_reason_that_is_said(tmp_path: Path) -> None:
    with EtcdServer(tmp_path, flags=("--quota-backend-bytes=4194304",)) as etcd:

        def run(*arguments: str) -> Result:
            return CliRunner().invoke(main, ["tenant", *arguments, "--etcd", etcd.endpoint])

        assert (await asyncio.to_thread(run, "create", "acme")).exit_code == 0
        membership = EtcdMembership(MembershipConfig(endpoints=(etcd.endpoint,)))
        with contextlib.suppress(UnavailableError):
            for number in range(100):
                await membership.records.write(f"filling/{number}", bytes(1 << 20), 0)
        await membership.close()
        for change in (("create", "beta"), ("key", "new", "acme", "ci"), ("delete", "acme", "--yes")):
            result = await asyncio.to_thread(run, *change)
            assert result.exit_code == 1
            assert "etcd is full (RESOURCE_EXHAUSTED: etcdserver: mvcc: database space exceeded)" in result.stderr
            assert "cannot be reached" not in result.stderr
        assert "acme" in (await asyncio.to_thread(run, "list")).stdout


def test_a_tenant_has_a_pool(run: Run, cluster: MembershipConfig, tmp_path: Path) -> None:
    def pool_of(name: str) -> object:
        return json.loads(run("show", name, "--json").stdout)["pool"]

    refused = run("create", "acme", "--pool", "finance")
    assert refused.exit_code == 2
    assert "no running gateway is configured with the pool 'finance', but with: none;" in refused.stderr
    assert "--allow-unknown-pool" in refused.stderr
    assert run("show", "acme").exit_code == 2, "nothing was made"
    made = run("create", "acme", "--pool", "finance", "--allow-unknown-pool")
    assert made.exit_code == 0
    assert "no running gateway is configured with the pool finance: tenants of it get 503 until one is" in made.stderr
    assert pool_of("acme") == "finance"
    assert "served by pool finance and no other" in run("show", "acme").stdout
    assert "finance" in run("list").stdout
    # Other changes leave it.
    assert run("set", "acme", "--share", "2").stdout == "tenant acme has class standard, share 2, pool finance\n"
    assert run("set-limits", "acme", "--max-choices", "8").exit_code == 0
    assert pool_of("acme") == "finance"
    told = run("set", "acme", "--pool", "none")
    assert (told.stdout, told.stderr) == ("tenant acme has class standard, share 2, pool none\n", "")
    assert pool_of("acme") is None
    assert "no pool of its own" in run("show", "acme").stdout
    for bad in ("Finance", "x" * 32, "a b"):
        refused = run("set", "acme", "--pool", bad)
        assert refused.exit_code == 2
        assert "lower-case letters, digits and dashes, at most 31" in refused.stderr

    file = tmp_path / "tenants.yaml"
    file.write_text("- {name: acme, share: 2, limits: {max_choices: 8}, pool: research}\n")
    looked = run("apply", "-f", str(file), "--dry-run")
    assert run("set", "acme", "--pool", "research").exit_code == 2
    assert looked.stdout == "acme: ~ pool: none -> research\n"
    assert "pool research" in looked.stderr
    assert pool_of("acme") is None
    assert run("apply", "-f", str(file)).exit_code == 0
    assert pool_of("acme") == "research"
    assert run("apply", "-f", "-", text="[{name: acme, pool: Finance}]").exit_code == 2
    assert run("apply", "-f", "-", text="[{name: acme, share: 2}]").exit_code == 0
    assert pool_of("acme") is None, "what the file does not say is not there"


def test_no_tenant_gets_a_pool_while_a_gateway_does_not_know_them(run: Run, cluster: MembershipConfig) -> None:
    assert run("create", "acme").exit_code == 0

    def gateway(name: str, pools: tuple[str, ...] | None) -> Member:
        return Member(
            kind=MemberKind.GATEWAY, member_id=MemberId(name), address="h:1", model="m", version="0.1", pools=pools
        )

    async def with_gateways(*members: Member) -> list[Result]:
        membership = EtcdMembership(cluster)
        registered = [await membership.register(member) for member in members]
        try:
            apply = ("apply", "-f", "-")
            return [
                await asyncio.to_thread(run, "set", "acme", "--pool", "finance"),
                await asyncio.to_thread(run, "create", "beta", "--pool", "finance"),
                await asyncio.to_thread(run, *apply, text="[{name: acme, pool: finance}]"),
                await asyncio.to_thread(run, "set", "acme", "--pool", "none"),
            ]
        finally:
            for registration in registered:
                await registration.revoke()
            await membership.close()

    *refused, taken_away = asyncio.run(with_gateways(gateway("new", ("finance",)), gateway("old", None)))
    for result in refused:
        assert result.exit_code == 2
        assert "old runs 0.1, which knows no pools" in result.stderr
        assert "--allow-unknown-pool" not in result.stderr, "it would not help"
    assert taken_away.exit_code == 0
    done = asyncio.run(with_gateways(gateway("new", ("finance",))))
    assert [result.exit_code for result in done] == [0, 0, 0, 0]
    assert not any("503" in result.stderr for result in done), "a gateway is configured with it"
    known, _, applied, taken_away = asyncio.run(with_gateways(gateway("new", ("batch", "research"))))
    assert known.exit_code == 2
    assert "with the pool 'finance', but with: batch, research; a tenant of it would get 503" in known.stderr
    assert (applied.exit_code, taken_away.exit_code) == (0, 0)
    assert "get 503 until one is" in applied.stderr, "files may come before the pools"
