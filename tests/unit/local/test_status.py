"""What `kvferry status` and `kvferry up` say of a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.config import TlsConfig
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry_local import commands
from kvferry_local.status import ClusterStatus, _look_at


def a_member(kind: MemberKind, **values: Any) -> Member:
    known = {"member_id": MemberId(f"{kind}-1"), "address": "127.0.0.1:1", "model": "m", "version": "0"}
    return Member(kind=kind, **{**known, **values})


async def status_with(member: Member) -> ClusterStatus:
    return ClusterStatus(
        name="c",
        url="",
        alive=True,
        uptime_s=1.0,
        engine="sim",
        model="m",
        etcd_endpoints=(),
        members=(await _look_at(member, TlsConfig(), 0.0),),
    )


async def test_volumes_that_a_keeper_cannot_use_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    keeper = a_member(MemberKind.KEEPER, volumes=("v-2",), volume_faults=("volume /a: /a: Not a directory",))
    seen = await status_with(keeper)
    commands._print_warnings(seen.warnings)
    assert capsys.readouterr().err == "kvferry: warning: keeper-1 does not use volume /a: /a: Not a directory\n"
    assert seen.as_json()["members"][0]["volume_faults"] == keeper.volume_faults


async def test_an_engine_without_the_tiers_that_are_configured_is_named() -> None:
    reason = "pages of tiers are not proven for a sliding window"
    seen = await status_with(a_member(MemberKind.DECODE, without_tiers=reason))
    assert seen.warnings == ["decode-1 has no tiers: pages of tiers are not proven for a sliding window"]
