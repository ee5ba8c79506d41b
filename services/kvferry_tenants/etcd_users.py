"""Set up etcd's users: members access kvferry's keys only, root everything. Idempotent.

python -m kvferry_tenants.etcd_users --config cluster.yaml --root-password-file FILE

Waits for etcd, and sets the member's password too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
from etcd3aio import EtcdError, prefix_range_end
from etcd3aio.auth import AuthService, PermissionType

from kvferry import config as configuration
from kvferry.config import MembershipConfig
from kvferry.errors import ConfigError, KvferryError, UnavailableError
from kvferry.membership.etcd_link import open_channel, read_password

ROOT = "root"  # etcd's own name for the user that may do everything
WAIT_S = 120.0
RETRY_S = 1.0
CALL_TIMEOUT_S = 5.0


async def ensure_users(config: MembershipConfig, root_password: str, *, wait_s: float = WAIT_S) -> None:
    """Raises ConfigError for a refused root password, UnavailableError without an answer in time."""
    if not config.user:
        raise ConfigError("membership.user: name the user of the members")
    password = read_password("membership.password_file", config.password_file)
    deadline_s = time.monotonic() + wait_s
    while True:
        fault = ""
        for endpoint in config.endpoints:
            channel = open_channel(config, endpoint)
            try:
                await _ensure(channel, config, password, root_password)
                return
            except (EtcdError, grpc.RpcError, TimeoutError) as error:
                fault = error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else str(error)
            finally:
                await channel.close(None)
        if time.monotonic() >= deadline_s:
            raise UnavailableError(f"etcd at {', '.join(config.endpoints)} did not take the users: {fault}")
        await asyncio.sleep(RETRY_S)


async def _ensure(channel: grpc.aio.Channel, config: MembershipConfig, password: str, root_password: str) -> None:
    auth = AuthService(channel, max_attempts=1)
    # Once authentication is enabled, only root may do the rest. etcd has no status of its own for "not yet enabled".
    try:
        answer = await auth.authenticate(ROOT, root_password, timeout=CALL_TIMEOUT_S)
        auth.set_token(answer.token)
        is_enabled = True
    except (EtcdError, grpc.RpcError) as error:
        if "authentication is not enabled" not in str(error):
            if "invalid user ID or password" in str(error):
                raise ConfigError("--root-password-file: etcd refuses root with this password") from None
            raise
        is_enabled = False
    role = config.user
    prefix = config.prefix.rstrip("/") + "/"
    await _add_if_absent(auth.user_add(ROOT, root_password, timeout=CALL_TIMEOUT_S))
    await _add_if_absent(auth.role_add(ROOT, timeout=CALL_TIMEOUT_S))
    await auth.user_grant_role(ROOT, ROOT, timeout=CALL_TIMEOUT_S)
    await _add_if_absent(auth.role_add(role, timeout=CALL_TIMEOUT_S))
    await auth.role_grant_permission(
        role, prefix, prefix_range_end(prefix), perm_type=PermissionType.READWRITE, timeout=CALL_TIMEOUT_S
    )
    await _revoke_wider(auth, role, prefix)
    if not await _add_if_absent(auth.user_add(config.user, password, timeout=CALL_TIMEOUT_S)):
        await auth.user_change_password(config.user, password, timeout=CALL_TIMEOUT_S)
    await auth.user_grant_role(config.user, role, timeout=CALL_TIMEOUT_S)
    if not is_enabled:
        await auth.auth_enable(timeout=CALL_TIMEOUT_S)


async def _revoke_wider(auth: AuthService, role: str, prefix: str) -> None:
    # Rights to more than the prefix, such as to keys of other clusters.
    begin, end = prefix.encode(), prefix_range_end(prefix)
    for right in (await auth.role_get(role, timeout=CALL_TIMEOUT_S)).perm:
        covers = right.key <= begin and (right.range_end == b"\0" or right.range_end >= end)  # 0: without an end
        if covers and (right.key, right.range_end) != (begin, end):
            await auth.role_revoke_permission(role, right.key, right.range_end, timeout=CALL_TIMEOUT_S)


async def _add_if_absent(call: Awaitable[Any]) -> bool:
    try:
        await call
    except (EtcdError, grpc.RpcError) as error:
        if "already exists" not in str(error):
            raise
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvferry_tenants.etcd_users", description="Set up etcd's users.")
    parser.add_argument("--config", type=Path, required=True, help="a YAML configuration with the section membership")
    parser.add_argument("--root-password-file", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        config = configuration.load(arguments.config).membership
        root_password = read_password("--root-password-file", arguments.root_password_file)
        asyncio.run(ensure_users(config, root_password))
    except KvferryError as error:
        print(error.message, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"etcd knows {ROOT} and {config.user}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
