"""The users of an etcd of ours, on a real one: made once, made again, and changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.etcd_server import EtcdServer
from kvferry.config import MembershipConfig, parse
from kvferry.errors import ConfigError, UnavailableError
from kvferry.membership.etcd import EtcdMembership
from kvferry_tenants.etcd_users import ensure_users


async def may_read(config: MembershipConfig) -> bool:
    membership = EtcdMembership(config)
    try:
        await membership.members()
    except ConfigError:
        return False
    finally:
        await membership.close()
    return True


async def may_write(config: MembershipConfig) -> bool:
    membership = EtcdMembership(config)
    try:
        await membership.records.write(f"tenants/{config.user}", b"{}", 0)
    except ConfigError:
        return False
    finally:
        await membership.close()
    return True


async def test_members_get_their_rights_and_a_new_password_and_nobody_else_gets_in(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("first\n")
    with EtcdServer(tmp_path) as etcd:
        config = MembershipConfig(endpoints=(etcd.endpoint,), user="kvferry", password_file=password)
        await ensure_users(config, "root's")
        assert await may_read(config)
        with pytest.raises(ConfigError):
            await EtcdMembership(MembershipConfig(endpoints=(etcd.endpoint,))).members()
        assert not await may_read(config.model_copy(update={"prefix": "/others"}))

        password.write_text("second\n")
        assert not await may_read(config)
        await ensure_users(config, "root's")
        assert await may_read(config)
        with pytest.raises(ConfigError, match="--root-password-file"):
            await ensure_users(config, "another", wait_s=0)


async def test_a_clusters_user_reads_and_writes_no_other_cluster(tmp_path: Path) -> None:
    """Also with names that are folders of a cluster, and a user with the rights of an earlier release."""
    with EtcdServer(tmp_path) as etcd:
        for arguments in (("role", "add", "kvferry"), ("role", "grant-permission", "--prefix=true", "kvferry",
                          "readwrite", "/kvferry/")):  # fmt: skip
            await etcd.ctl(*arguments)
        configs = {}
        for name in ("kvferry", "prod", "tenants", "clusters"):
            (tmp_path / name).write_text(name)
            membership = {"endpoints": [etcd.endpoint], "user": name, "password_file": str(tmp_path / name)}
            configs[name] = parse({"name": name, "membership": membership}).membership
            await ensure_users(configs[name], "root's")
        for user, config in configs.items():
            for other in configs.values():
                as_user = config.model_copy(update={"prefix": other.prefix})
                assert (await may_read(as_user), await may_write(as_user)) == ((other is config),) * 2, (user, other)


async def test_an_etcd_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("x")
    config = MembershipConfig(endpoints=("127.0.0.1:1",), user="kvferry", password_file=tmp_path / "password")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        await ensure_users(config, "root's", wait_s=0)
