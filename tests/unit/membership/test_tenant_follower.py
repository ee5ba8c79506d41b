"""Following the records of tenants without long turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.gateway.identity.tenant_directory import TenantDirectory
from kvferry.membership import tenant_follower
from kvferry.membership.base import RecordChange, RecordChanged, Records
from kvferry.membership.tenant_follower import CHANGE_BYTES, RECORD_BYTES, TURN_BYTES, TenantFollower
from kvferry.tenancy.records import MAX_KEYS, MAX_TENANTS
from kvferry.worker.engine_terms import EngineTerms
from kvferry_keeper.volume_tenants import VolumeTenants
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import until

FLOOR = '"own_tiers":{"device":{"floor":0.001},"volume":{"floor":0.001}},'


def value_of(name: str, *, num_keys: int = 0, fields: str = "") -> bytes:
    """A record, made without the checks of `records.encode`, which take longer than what is tested."""
    number = int(name[1:])
    keys = ",".join(f'{{"name":"k{at}","sha256":"{number << 8 | at:064x}"}}' for at in range(num_keys))
    return f'{{"name":"{name}",{fields}"keys":[{keys}]}}'.encode()


def full_records(num_tenants: int, *, fields: str = "") -> Records:
    names = [f"t{number}" for number in range(num_tenants)]
    return Records({name: value_of(name, num_keys=MAX_KEYS, fields=fields) for name in names})


class Turns:
    """Numbers the turns of the loop, and calls `at_each` in each."""

    def __init__(self) -> None:
        self.number = 0
        self.at_each = lambda: None

    async def count(self) -> None:
        while True:
            self.number += 1
            self.at_each()
            await asyncio.sleep(0)


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    counted = Turns()
    counting = asyncio.create_task(counted.count())
    yield counted
    counting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await counting


class Log:
    """The callbacks of a follower, in order, and the turn of each."""

    def __init__(self, store: Any, turns: Turns | None = None) -> None:
        self.calls: list[str] = []
        self.turns: Counter[int] = Counter()
        self._turn = turns or Turns()
        self.follower = TenantFollower(
            store,
            on_record=lambda record: self.add(f"{record.name}@{record.epoch}"),
            on_gone=lambda name: self.add(f"-{name}"),
            on_unreadable=lambda name, error: self.add(f"?{name}"),
            on_change=lambda: self.calls.append("."),
        )

    def add(self, call: str) -> None:
        self.calls.append(call)
        self.turns[self._turn.number] += 1


async def test_no_turn_reads_many_keys_of_the_most_tenants_with_the_most_keys(turns: Turns) -> None:
    log = Log(None, turns)
    snapshot = full_records(MAX_TENANTS)
    await log.follower.take(snapshot)
    assert sum(log.turns.values()) == MAX_TENANTS
    smallest = min(map(len, snapshot.by_name.values()))
    assert max(log.turns.values()) <= TURN_BYTES // smallest
    assert max(log.turns.values()) * MAX_KEYS < 1000
    log.turns.clear()
    await log.follower.take(Records({}))
    assert sum(log.turns.values()) == MAX_TENANTS
    assert max(log.turns.values()) <= 12


async def test_small_records_are_read_together_but_not_all(turns: Turns) -> None:
    log = Log(None, turns)
    await log.follower.take(Records({f"t{number}": value_of(f"t{number}") for number in range(MAX_TENANTS)}))
    assert 10 < max(log.turns.values()) <= TURN_BYTES // RECORD_BYTES


async def test_changes_that_wait_are_not_all_read_in_one_turn(turns: Turns) -> None:
    """A watch with a backlog gives its changes without a turn of the loop between them."""
    store = MemoryMembership(MemoryRegistry()).records
    log = Log(store, turns)
    log.follower.start()
    try:
        await until(lambda: log.calls == ["."])
        for number in range(500):
            assert await store.write(f"tenants/t{number}", value_of(f"t{number}"), 0)
        await until(lambda: log.calls.count(".") == 501)
    finally:
        await log.follower.close()
    assert max(log.turns.values()) <= TURN_BYTES // CHANGE_BYTES


class Services:
    """The followers of a gateway, a keeper and a worker."""

    def __init__(self) -> None:
        membership = MemoryMembership(MemoryRegistry())
        keeper: Any = SimpleNamespace(keeper_id="keeper-0", lowest_epochs={})
        self.directory = TenantDirectory(membership.records)
        self.volumes = VolumeTenants(membership, keeper, ())
        self.engine_terms = EngineTerms(
            membership.records,
            role="decode",
            worker_id="w0",
            capacities={"device": 1000},
            prompt_tokens=dict,
            apply=lambda terms: None,
        )

    def followers(self) -> Iterator[TenantFollower]:
        yield from (self.directory.follower, self.volumes._follower, self.engine_terms.follower)

    async def take(self, change: RecordChange) -> None:
        for follower in self.followers():
            await follower.take(change)


@pytest.mark.parametrize("service", [0, 1, 2], ids=["gateway", "keeper", "worker"])
async def test_each_service_gives_the_loop_turns_while_it_reads(turns: Turns, service: int) -> None:
    follower = list(Services().followers())[service]
    begun = turns.number
    await follower.take(full_records(100))
    assert turns.number - begun > 10


async def test_a_gateway_refuses_no_key_while_it_reads_and_knows_none_before_all_are_read(turns: Turns) -> None:
    directory = Services().directory
    digests = [bytes.fromhex(f"{number << 8:064x}") for number in range(100)]
    seen: set[tuple[bool, int]] = set()

    def look() -> None:
        seen.add((directory.is_known, sum(directory.find(digest) is not None for digest in digests)))

    turns.at_each = look
    await directory.follower.take(full_records(100))
    assert seen == {(False, 0)}
    seen.clear()
    await directory.follower.take(full_records(100))
    await directory.follower.take(Records({**full_records(100).by_name, "t100": value_of("t100")}))
    assert seen == {(True, 100)}


async def test_keepers_and_workers_use_floors_of_whole_changes_only(turns: Turns) -> None:
    services = Services()
    seen: set[tuple[int, int]] = set()
    turns.at_each = lambda: seen.add(
        (
            sum(tiers["volume"].floor > 0 for tiers in services.volumes._tiers.values()),
            sum(tiers["device"].floor > 0 for tiers in services.engine_terms._tenants.values()),
        )
    )
    await services.take(full_records(100, fields=FLOOR))
    await services.take(full_records(100))
    await asyncio.sleep(0)
    assert seen == {(0, 0), (100, 0), (100, 100), (0, 100)}


async def test_a_keeper_keeps_the_terms_and_epochs_of_records() -> None:
    volumes = Services().volumes
    await volumes._follower.take(Records({"t1": value_of("t1", fields='"epoch":4,'), "t2": value_of("t2")}))
    assert volumes._tiers.keys() == {"t1", "t2"}
    assert volumes._keeper.lowest_epochs == {"t1": 4}
    assert volumes._wanted.is_set()
    volumes._wanted.clear()
    await volumes._follower.take(RecordChanged("t2", b"{"))
    await volumes._follower.take(RecordChanged("t1", value_of("t1", fields='"epoch":4,"is_deleted":true,')))
    assert volumes._tiers.keys() == {"t2"}
    assert volumes._keeper.lowest_epochs == {"t1": 4}
    assert not volumes._wanted.is_set()
    await volumes._follower.take(Records({}))
    assert not volumes._tiers
    assert volumes._keeper.lowest_epochs == {"t1": 4}


async def test_what_changes_while_a_snapshot_is_read_follows_it_in_order() -> None:
    store = MemoryMembership(MemoryRegistry()).records
    names = [f"t{number}" for number in range(50)]
    for name in names:
        assert await store.write(f"tenants/{name}", value_of(name, num_keys=MAX_KEYS), 0)
    log = Log(store)
    log.follower.start()
    try:
        while not log.calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert "t49@0" not in log.calls, "all were read in one turn"

        async def change(name: str, value: bytes | None) -> None:
            found = await store.read(f"tenants/{name}")
            assert await store.write(f"tenants/{name}", value, 0 if found is None else found.revision)

        await change("t0", value_of("t0", fields='"epoch":1,'))
        await change("t49", None)
        await change("t48", b"{")
        await change("t49", value_of("t49", fields='"epoch":2,'))
        await change("t0", None)
        await until(lambda: log.calls.count(".") == 6)
    finally:
        await log.follower.close()
    snapshot = [f"{name}@0" for name in names]
    assert log.calls == [*snapshot, ".", "t0@1", ".", "-t49", ".", "?t48", ".", "t49@2", ".", "-t0", "."]


class Script:
    """Each watch gives the next list of changes, then stays silent."""

    def __init__(self, *watches: list[RecordChange]) -> None:
        self._scripts = list(watches)

    async def watch(self, folder: str) -> AsyncIterator[RecordChange]:
        for change in self._scripts.pop(0):
            yield change
        await asyncio.Event().wait()


async def test_a_tenant_that_is_gone_is_reported_although_a_callback_failed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_follower, "REWATCH_S", 0.01)
    first, second = Records({"t1": value_of("t1"), "t2": value_of("t2")}), Records({"t3": value_of("t3")})
    log = Log(Script([first, second], [second]))
    add, failures = log.add, [RuntimeError("of this test")]

    def fail_once(call: str) -> None:
        if call.startswith("-") and failures:
            raise failures.pop()
        add(call)

    log.add = fail_once  # type: ignore[method-assign]
    log.follower.start()
    try:
        await until(lambda: log.calls.count(".") == 2)
    finally:
        await log.follower.close()
    assert log.calls[:3] == ["t1@0", "t2@0", "."]
    assert sorted(log.calls[3:5]) == ["-t1", "-t2"]
    assert log.calls[5:] == ["t3@0", "."]
