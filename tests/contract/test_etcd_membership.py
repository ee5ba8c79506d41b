"""EtcdMembership where only a real etcd can prove it: kills, hangs, lost data, compaction, certificates, passwords."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.etcd_server import Authority, EtcdServer, ServerTls, find_binary, write_token_keys
from kvferry.config import MembershipConfig
from kvferry.errors import ConfigError, UnavailableError
from kvferry.membership.base import (
    Joined,
    Left,
    Member,
    MemberChange,
    MemberId,
    MemberKind,
    Registration,
    RetryPolicy,
    Snapshot,
)
from kvferry.membership.etcd import EtcdMembership
from kvferry.membership.etcd_records import Listing, record_key
from support.waiting import SOON_S

RETRY = RetryPolicy(first_s=0.05, max_s=0.3)

pytestmark = pytest.mark.skipif(find_binary() is None, reason="no etcd binary")


def member(name: str = "one", *, version: str = "1") -> Member:
    return Member(
        kind=MemberKind.DECODE, member_id=MemberId(name), address="127.0.0.1:1", model="tiny", version=version
    )


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def following(watch: AsyncIterator[MemberChange]) -> MemberChange:
    async with asyncio.timeout(SOON_S):
        return await anext(watch)


async def until(watch: AsyncIterator[MemberChange], wanted: MemberChange) -> None:
    while await following(watch) != wanted:
        pass


async def until_there(watch: AsyncIterator[MemberChange], wanted: Member) -> list[MemberChange]:
    """All changes up to and with the one that tells of the member."""
    changes = [await following(watch)]
    while not tells(changes[-1], wanted):
        changes.append(await following(watch))
    return changes


async def until_gone(watch: AsyncIterator[MemberChange], unwanted: Member) -> None:
    change = await following(watch)
    while change != Left(unwanted.kind, unwanted.member_id) and (
        not isinstance(change, Snapshot) or unwanted in change.members
    ):
        change = await following(watch)


def tells(change: MemberChange, wanted: Member) -> bool:
    return change == Joined(wanted) or (isinstance(change, Snapshot) and wanted in change.members)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def config(server: EtcdServer) -> MembershipConfig:
    return MembershipConfig(endpoints=(server.endpoint,), prefix=f"/test/{uuid.uuid4().hex}", lease_ttl_s=6)


@pytest.fixture
def short_config(config: MembershipConfig) -> MembershipConfig:
    """Leases that end while a test waits; a busy machine may miss a renewal, so only where it ends is certain."""
    return config.model_copy(update={"lease_ttl_s": 2})


QUOTA_BYTES = 4 << 20


async def exceed_quota(membership: EtcdMembership) -> None:
    """Write until etcd, with a quota of QUOTA_BYTES, refuses it. Raises what the write raises."""
    for number in range(100):  # etcd looks at the size of its file, which grows a moment later
        await membership.records.write(f"filling/{number}", bytes(1 << 20), 0)


class Memberships:
    """Makes them, closes them."""

    def __init__(self) -> None:
        self._made: list[EtcdMembership] = []

    def __call__(self, config: MembershipConfig, kind: type[EtcdMembership] = EtcdMembership) -> EtcdMembership:
        self._made.append(kind(config, retry=RETRY, rng=random.Random(1)))
        return self._made[-1]


@pytest.fixture
async def connect() -> AsyncIterator[Memberships]:
    memberships = Memberships()
    yield memberships
    for each in memberships._made:
        await each.close()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)  # gRPC ends its own a moment later


async def leased_keys(server: EtcdServer, prefix: str) -> dict[str, int]:
    """key -> lease id."""
    answer = json.loads(await server.ctl("get", "--prefix", prefix, "--write-out=json"))
    return {base64.b64decode(kv["key"]).decode(): kv.get("lease", 0) for kv in answer.get("kvs", ())}


async def test_keys_are_where_operators_look_for_them(
    server: EtcdServer, config: MembershipConfig, connect: Memberships
) -> None:
    await connect(config).register(member())
    keys = await leased_keys(server, config.prefix)
    assert list(keys) == [f"{config.prefix}/members/decode/one"]
    assert keys[f"{config.prefix}/members/decode/one"] != 0


async def test_a_prefix_sees_only_its_own_cluster(config: MembershipConfig, connect: Memberships) -> None:
    await connect(config).register(member())
    longer = config.model_copy(update={"prefix": f"{config.prefix}-2"})
    assert await connect(longer).members() == ()


async def test_a_lease_survives_kill_and_restart_and_the_watch_goes_on(
    server: EtcdServer, config: MembershipConfig, connect: Memberships
) -> None:
    membership = connect(config)
    await membership.register(member())
    watch = connect(config).watch()
    assert await following(watch) == Snapshot((member(),))
    server.kill()
    await server.start()
    assert await following(watch) == Snapshot((member(),))
    await membership.register(member("two"))
    await until_there(watch, member("two"))


async def test_everyone_registers_again_with_an_etcd_that_lost_its_data(
    server: EtcdServer, config: MembershipConfig, connect: Memberships
) -> None:
    for turn in range(5):  # so that revisions of the new one are behind
        await server.ctl("put", "unrelated", str(turn))
    registration = await connect(config).register(member())
    watch = connect(config).watch()
    await following(watch)
    server.kill()
    server.lose_data()
    await server.start()
    changes = await until_there(watch, member())
    assert isinstance(changes[0], Snapshot)
    await eventually(lambda: not registration.fenced)
    assert await connect(config).members() == (member(),)


async def test_a_hanging_etcd_fences_and_the_member_returns(
    server: EtcdServer, short_config: MembershipConfig, connect: Memberships
) -> None:
    registration = await connect(short_config).register(member())
    watch = connect(short_config).watch()
    await until_there(watch, member())
    server.hang()
    try:
        with pytest.raises(UnavailableError):
            await connect(short_config).members()
        await eventually(lambda: registration.fenced)
    finally:
        server.go_on()
    await eventually(lambda: not registration.fenced)
    await registration.update(member(version="2"))
    await until_there(watch, member(version="2"))


async def test_a_watch_on_a_connection_gone_silent_is_opened_anew(
    server: EtcdServer, config: MembershipConfig, connect: Memberships, caplog: pytest.LogCaptureFixture
) -> None:
    watch = connect(config).watch()
    assert await following(watch) == Snapshot(())
    registration = await connect(config).register(member())
    await until_there(watch, member())  # so the watch is open, not opening
    await registration.revoke()
    await until(watch, Left(MemberKind.DECODE, MemberId("one")))
    server.hang()
    try:
        await eventually(lambda: "members cannot be watched" in caplog.text)
    finally:
        server.go_on()
    assert await following(watch) == Snapshot(())


async def test_a_killed_process_leaves_with_its_lease(short_config: MembershipConfig, connect: Memberships) -> None:
    watch = connect(short_config).watch()
    assert await following(watch) == Snapshot(())
    script = """
import asyncio, sys
from kvferry.config import MembershipConfig
from kvferry.membership.base import Member
from kvferry.membership.etcd import EtcdMembership

async def main():
    config = MembershipConfig.model_validate_json(sys.argv[1])
    member = Member(kind="decode", member_id="one", address="127.0.0.1:1", model="tiny", version="1")
    await EtcdMembership(config).register(member)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, short_config.model_dump_json())
    try:
        await until_there(watch, member())
    finally:
        process.kill()
        await process.wait()
    await until_gone(watch, member())


async def test_a_revoked_lease_is_replaced(server: EtcdServer, config: MembershipConfig, connect: Memberships) -> None:
    await connect(config).register(member())
    watch = connect(config).watch()
    await following(watch)
    ((_, lease_id),) = (await leased_keys(server, config.prefix)).items()
    await server.ctl("lease", "revoke", f"{lease_id:x}")
    await until_gone(watch, member())
    await until_there(watch, member())
    ((_, new_lease_id),) = (await leased_keys(server, config.prefix)).items()
    assert new_lease_id not in (0, lease_id)


async def test_a_deleted_record_is_written_again(
    server: EtcdServer, config: MembershipConfig, connect: Memberships
) -> None:
    await connect(config).register(member())
    watch = connect(config).watch()
    await following(watch)
    await server.ctl("del", record_key(config.prefix, MemberKind.DECODE, MemberId("one")))
    await until_gone(watch, member())
    await until_there(watch, member())


async def test_revoke_takes_the_lease_with_it(
    server: EtcdServer, config: MembershipConfig, connect: Memberships
) -> None:
    registration = await connect(config).register(member())
    ((_, lease_id),) = (await leased_keys(server, config.prefix)).items()
    await registration.revoke()
    assert f"{lease_id:x}" not in await server.ctl("lease", "list")


async def test_a_record_that_cannot_be_read_is_passed_over(
    server: EtcdServer, config: MembershipConfig, connect: Memberships, caplog: pytest.LogCaptureFixture
) -> None:
    membership = connect(config)
    folder = f"{config.prefix}/members"
    elsewhere = '{"kind":"decode","member_id":"x","address":"a:1","model":"m","version":"1"}'
    bad = {"decode/torn": "{", "decode/y": elsewhere, "ferry/z": elsewhere, "decode/short": "{}"}
    newer = elsewhere.replace("}", ',"colour":"red"}')
    for name, value in bad.items():
        await server.ctl("put", f"{folder}/{name}", value)
    watch = membership.watch()
    assert await following(watch) == Snapshot(())
    for name, value in bad.items():
        await server.ctl("put", f"{folder}/{name}", value)
        await server.ctl("del", f"{folder}/{name}")
    await server.ctl("put", f"{folder}/decode/x", newer)
    change = await following(watch)
    assert isinstance(change, Joined)
    assert change.member.member_id == "x"
    await server.ctl("put", f"{folder}/decode/x", "{")
    await server.ctl("del", f"{folder}/decode/x")
    assert await following(watch) == Left(MemberKind.DECODE, MemberId("x"))
    assert caplog.text.count("passing over") == 2 * len(bad) + 1


async def test_a_compaction_between_list_and_watch_leads_to_a_new_snapshot(
    server: EtcdServer, config: MembershipConfig, connect: Memberships
) -> None:
    class Overtaken(EtcdMembership):
        """Others write and compact in the moment between its first listing and its watch."""

        overtaken = False

        async def _list(self, link: Any, prefix: str) -> Listing:
            listing = await super()._list(link, prefix)
            if not self.overtaken:
                self.overtaken = True
                await connect(config).register(member("two"))
                await server.ctl("put", "unrelated", "1")
                await server.compact()
            return listing

    await connect(config).register(member())
    watch = connect(config, Overtaken).watch()
    changes = await until_there(watch, member("two"))
    assert changes[-1] == Snapshot((member(), member("two")))
    await connect(config).register(member("three"))
    assert await following(watch) == Joined(member("three"))


async def test_a_compaction_under_an_idle_watch_costs_nothing(
    server: EtcdServer, config: MembershipConfig, connect: Memberships
) -> None:
    watch = connect(config).watch()
    assert await following(watch) == Snapshot(())
    for turn in range(5):
        await server.ctl("put", "unrelated", str(turn))
    await server.compact()
    await connect(config).register(member())
    await until_there(watch, member())


async def test_a_reader_far_behind_gets_a_snapshot_instead(
    config: MembershipConfig, connect: Memberships, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.membership.etcd._MAX_BACKLOG", 3)
    membership = connect(config)
    registration = await membership.register(member())
    watch = membership.watch()
    await following(watch)
    for version in range(2, 12):
        await registration.update(member(version=str(version)))
    last = member(version="11")
    changes = await until_there(watch, last)
    assert len(changes) <= 5


async def test_a_dead_endpoint_is_passed_by(config: MembershipConfig, connect: Memberships, server: EtcdServer) -> None:
    port = server.endpoint.rpartition(":")[2]
    several = config.model_copy(update={"endpoints": ("127.0.0.1:1", f"localhost:{port}", "127.0.0.1:2")})
    for seed in range(4):
        membership = EtcdMembership(several, retry=RETRY, rng=random.Random(seed))
        registration = await membership.register(member(f"m{seed}"))
        watch = membership.watch()
        assert isinstance(await following(watch), Snapshot)
        await registration.revoke()
        assert await membership.members() == ()
        await membership.close()


async def test_the_moment_of_the_renewal_counts_for_the_fence(
    short_config: MembershipConfig, connect: Memberships
) -> None:
    now_s = [100.0]
    membership = EtcdMembership(short_config, clock=lambda: now_s[0])
    registration = await membership.register(member())
    assert not registration.fenced
    now_s[0] += 2.5
    assert registration.fenced
    await eventually(lambda: not registration.fenced)  # the first renewal comes soon
    await membership.close()


async def test_cancelled_calls_leave_nothing_behind(
    server: EtcdServer, config: MembershipConfig, connect: Memberships
) -> None:
    membership = connect(config)
    server.hang()
    try:
        calls = [asyncio.create_task(membership.members()), asyncio.create_task(membership.register(member()))]
        for _ in range(5):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        server.go_on()
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert await membership.members() == ()


async def test_an_outage_is_one_line_in_the_log(
    server: EtcdServer, short_config: MembershipConfig, connect: Memberships, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    registration = await connect(short_config).register(member())
    server.kill()
    await eventually(lambda: registration.fenced)
    await server.start()
    await eventually(lambda: not registration.fenced)
    await eventually(lambda: "registered again" in caplog.text)
    assert caplog.text.count("cannot be renewed") == 1


# Certificates


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("strangers"), "strangers")


@pytest.fixture(scope="module")
def tls_server(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    tls = ServerTls(ours.ca_file, *ours.issue("server"), *ours.issue("operator"))
    with EtcdServer(tmp_path_factory.mktemp("etcd-tls"), tls=tls) as running:
        yield running


def tls_config(server: EtcdServer, ca_file: Path, pair: tuple[Path, Path] | None) -> MembershipConfig:
    cert_file, key_file = pair or (None, None)
    return MembershipConfig(
        endpoints=(server.endpoint,),
        prefix=f"/test/{uuid.uuid4().hex}",
        lease_ttl_s=2,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
    )


async def test_tls_with_a_client_certificate_also_over_a_restart(
    tls_server: EtcdServer, ours: Authority, connect: Memberships
) -> None:
    config = tls_config(tls_server, ours.ca_file, ours.issue("worker"))
    registration = await connect(config).register(member())
    watch = connect(config).watch()
    assert await following(watch) == Snapshot((member(),))
    tls_server.kill()
    await eventually(lambda: registration.fenced)
    await tls_server.start()
    await eventually(lambda: not registration.fenced)
    await until_there(watch, member())


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(
    tls_server: EtcdServer, ours: Authority, strangers: Authority, tmp_path: Path, connect: Memberships
) -> None:
    cert_file, key_file = tmp_path / "tls.crt", tmp_path / "tls.key"
    membership = None
    for authority in (strangers, ours):
        issued_cert, issued_key = authority.issue("rotated")
        cert_file.write_bytes(issued_cert.read_bytes())
        key_file.write_bytes(issued_key.read_bytes())
        membership = membership or connect(tls_config(tls_server, ours.ca_file, (cert_file, key_file)))
        if authority is strangers:
            with pytest.raises(UnavailableError):
                await membership.members()
    assert membership is not None
    assert await membership.members() == ()


async def test_etcd_turns_away_clients_without_the_right_certificate(
    tls_server: EtcdServer, ours: Authority, strangers: Authority, connect: Memberships
) -> None:
    for pair in (strangers.issue("intruder"), None):
        with pytest.raises(UnavailableError):
            await connect(tls_config(tls_server, ours.ca_file, pair)).register(member())


async def test_we_turn_away_an_etcd_of_another_authority(
    tls_server: EtcdServer, ours: Authority, strangers: Authority, connect: Memberships
) -> None:
    config = tls_config(tls_server, strangers.ca_file, ours.issue("careful"))
    with pytest.raises(UnavailableError):
        await connect(config).members()


async def test_plain_text_to_a_tls_etcd_is_unavailable(tls_server: EtcdServer, connect: Memberships) -> None:
    config = MembershipConfig(endpoints=(tls_server.endpoint,), lease_ttl_s=2)
    with pytest.raises(UnavailableError):
        await connect(config).members()


def test_faulty_files_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"membership\.endpoints"):
        EtcdMembership(MembershipConfig())
    endpoints = ("127.0.0.1:1",)
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=r"membership\.ca_file.*missing"):
        EtcdMembership(MembershipConfig(endpoints=endpoints, ca_file=missing))
    with pytest.raises(ConfigError, match=r"membership\.password_file.*missing"):
        EtcdMembership(MembershipConfig(endpoints=endpoints, user="u", password_file=missing))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        EtcdMembership(MembershipConfig(endpoints=endpoints, user="u", password_file=binary))


async def test_over_quota_leases_live_and_the_cause_is_named(
    tmp_path: Path, connect: Memberships, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    full = r"the registry writes nothing, its etcd is full \(.*database space exceeded\): .*docs/operator/etcd.md"
    with EtcdServer(tmp_path, flags=(f"--quota-backend-bytes={QUOTA_BYTES}",)) as server:
        config = MembershipConfig(endpoints=(server.endpoint,), prefix="/kvferry/clusters/kvferry", lease_ttl_s=2)
        membership = connect(config)
        registration = await membership.register(member())
        watch = membership.watch()
        assert await following(watch) == Snapshot((member(),))
        with pytest.raises(UnavailableError, match=full):
            await exceed_quota(membership)
        with pytest.raises(UnavailableError, match=full):
            await membership.register(member("two"))

        # Its record stays as it was, under a lease that is renewed.
        await registration.update(member(version="2"))
        for _ in range(3):
            before_s = registration._renewed_at_s
            await eventually(lambda before_s=before_s: registration._renewed_at_s != before_s)
            assert not registration.fenced
        assert await membership.members() == (member(),)
        assert sum("database space exceeded" in record.message for record in caplog.records) == 1, caplog.text

        await server.free_space("/kvferry/clusters/kvferry/filling/")
        await until_there(watch, member(version="2"))
        assert not registration.fenced


# Users

PREFIX = "/kvferry"
SECRET = "correct-horse-battery"
AS_ROOT = ("--user=root:root-secret",)


@pytest.fixture(scope="module")
def auth_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("etcd-auth")


@pytest.fixture(scope="module")
def auth_server(auth_folder: Path) -> Iterator[EtcdServer]:
    public_file, private_file = write_token_keys(auth_folder)
    token = f"jwt,pub-key={public_file},priv-key={private_file},sign-method=RS256,ttl=1s"
    with EtcdServer(auth_folder, flags=(f"--auth-token={token}", "--bcrypt-cost=4")) as running:
        running.enable_auth("root-secret", user="ferry", user_password=SECRET, prefix=PREFIX)
        yield running


@pytest.fixture(scope="module")
def simple_auth_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd-simple-auth"), flags=("--bcrypt-cost=4",)) as running:
        running.enable_auth("root-secret", user="ferry", user_password=SECRET, prefix=PREFIX)
        yield running


def auth_config(server: EtcdServer, folder: Path, *, password: str = SECRET, prefix: str = "") -> MembershipConfig:
    password_file = folder / f"{uuid.uuid4().hex}.password"
    password_file.write_text(f"{password}\n")
    return MembershipConfig(
        endpoints=(server.endpoint,),
        prefix=prefix or f"{PREFIX}/{uuid.uuid4().hex}",
        lease_ttl_s=2,
        user="ferry",
        password_file=password_file,
    )


async def test_an_expired_token_is_replaced_unseen(
    auth_server: EtcdServer, tmp_path: Path, connect: Memberships
) -> None:
    membership = connect(auth_config(auth_server, tmp_path))
    registration: Registration = await membership.register(member())
    watch = membership.watch()
    assert await following(watch) == Snapshot((member(),))
    tokens = {membership._connector.login.token}
    async with asyncio.timeout(SOON_S):
        while len(tokens) < 3:
            assert await membership.members() == (member(),)
            tokens.add(membership._connector.login.token)
            await asyncio.sleep(0.05)
    await eventually(lambda: not registration.fenced)
    await registration.update(member(version="2"))
    await until_there(watch, member(version="2"))


async def test_a_restart_of_an_etcd_with_users_is_unseen(
    simple_auth_server: EtcdServer, tmp_path: Path, connect: Memberships
) -> None:
    membership = connect(auth_config(simple_auth_server, tmp_path))
    registration = await membership.register(member())
    watch = membership.watch()
    await following(watch)
    simple_auth_server.kill()
    await simple_auth_server.start()
    assert await following(watch) == Snapshot((member(),))
    await registration.update(member(version="2"))
    await until_there(watch, member(version="2"))


async def test_changed_rights_ask_for_a_new_token(
    auth_server: EtcdServer, tmp_path: Path, connect: Memberships
) -> None:
    membership = connect(auth_config(auth_server, tmp_path))
    await membership.register(member())
    await auth_server.ctl(*AS_ROOT, "role", "add", uuid.uuid4().hex)
    assert await membership.members() == (member(),)


async def test_a_new_password_replaces_the_old_one_at_run_time(
    simple_auth_server: EtcdServer, tmp_path: Path, connect: Memberships
) -> None:
    config = auth_config(simple_auth_server, tmp_path)
    membership = connect(config)
    registration = await membership.register(member())
    watch = membership.watch()
    await following(watch)
    token = membership._connector.login.token
    assert config.password_file is not None
    for password in ("changed", SECRET):
        await simple_auth_server.set_password("ferry", password, AS_ROOT)  # etcd forgets the user's tokens
        with pytest.raises(ConfigError):
            await membership.members()
        config.password_file.write_text(password)
        assert await membership.members() == (member(),)
    assert membership._connector.login.token != token
    await eventually(lambda: not registration.fenced)
    await registration.update(member(version="2"))
    await until_there(watch, member(version="2"))


async def test_a_wrong_password_is_named_and_never_told(
    simple_auth_server: EtcdServer, tmp_path: Path, connect: Memberships, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    membership = connect(auth_config(simple_auth_server, tmp_path, password="tell-nobody"))
    with pytest.raises(ConfigError, match=r"membership\.user.*ferry") as caught:
        await membership.register(member())
    seen = f"{caught.value!r} {caught.value.__cause__!r} {membership!r} {caplog.text}"
    assert "tell-nobody" not in seen


async def test_a_changed_password_is_read_again(
    simple_auth_server: EtcdServer, tmp_path: Path, connect: Memberships
) -> None:
    config = auth_config(simple_auth_server, tmp_path, password="outdated")
    membership = connect(config)
    with pytest.raises(ConfigError):
        await membership.members()
    assert config.password_file is not None
    config.password_file.write_text(SECRET)
    assert await membership.members() == ()


async def test_keys_of_others_are_refused(simple_auth_server: EtcdServer, tmp_path: Path, connect: Memberships) -> None:
    membership = connect(auth_config(simple_auth_server, tmp_path, prefix="/theirs"))
    with pytest.raises(ConfigError, match=r"membership\.prefix.*/theirs"):
        await membership.members()


async def test_without_a_user_an_etcd_with_users_refuses(simple_auth_server: EtcdServer, connect: Memberships) -> None:
    config = MembershipConfig(endpoints=(simple_auth_server.endpoint,), prefix=PREFIX, lease_ttl_s=2)
    with pytest.raises(ConfigError, match=r"membership\.user"):
        await connect(config).members()


async def test_a_user_for_an_etcd_without_users_is_refused(
    server: EtcdServer, tmp_path: Path, connect: Memberships
) -> None:
    with pytest.raises(ConfigError, match=r"membership\.user"):
        await connect(auth_config(server, tmp_path)).members()
