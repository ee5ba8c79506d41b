"""Places of tenants on a worker, over a link."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.engine.base import Turn
from kvferry.errors import Overloaded, TenantOverloaded
from kvferry.link import tenants
from kvferry.link.worker_link import WorkerLink
from kvferry.worker.turns import Turns
from support.link_peers import member_of, request, serving, simulated
from support.waiting import until

NOISE, GOLD = Turn("noise", 1.0), Turn("gold", 4.0)


async def test_one_tenant_never_takes_the_places_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "PAUSE_S", 0.3)
    async with simulated() as engine, serving(engine, max_requests=16, turns=Turns(8)) as worker:
        link = WorkerLink(member_of(worker), "g", lambda: None)
        try:
            await until(lambda: link.usable)
            places = [await link.reserve(NOISE) for _ in range(8)]
            with pytest.raises(TenantOverloaded, match="8 requests of this tenant, as many as"):
                await link.reserve(NOISE)
            assert not link.has_room_for(NOISE)
            assert link.has_room_for(GOLD), "the worker is not full"
            assert not worker.is_full
            with pytest.raises(TenantOverloaded):
                await link.submit(request("n", turn=NOISE), lambda output: None).wait()
            places += [await link.reserve(GOLD) for _ in range(4)]
            with pytest.raises(TenantOverloaded):
                await link.reserve(GOLD)
            places += [await link.reserve(Turn(f"t{number}", 1.0)) for number in range(4)]
            with pytest.raises(Overloaded):
                await link.reserve(Turn("one more", 1.0))
            assert await link.reserve(NOISE, is_resumed=True), "an answer that goes on is not refused"
            assert not link.has_room_for(GOLD)
            for place in places:
                place.release()
            await until(lambda: worker.num_requests == 1 and link.has_room_for(NOISE))
            # With its requests a tenant holds as many places as with reservations, and gives all of them back.
            for turn in range(4):
                answers = [link.submit(request(f"{turn}-{i}", turn=NOISE), lambda output: None) for i in range(7)]
                await asyncio.gather(*(answer.wait() for answer in answers))
            (session,) = worker.sessions
            assert session.num_requests_of("noise") == 1
            assert len(session._tenants) < 150
        finally:
            await link.close()


async def test_without_shares_a_tenant_may_have_all_places() -> None:
    async with simulated() as engine, serving(engine, max_requests=16) as worker:
        link = WorkerLink(member_of(worker), "g", lambda: None)
        try:
            await until(lambda: link.usable)
            for _ in range(16):
                await link.reserve(NOISE)
            with pytest.raises(Overloaded) as refused:
                await link.reserve(NOISE)
            assert not isinstance(refused.value, TenantOverloaded)
        finally:
            await link.close()


async def test_work_elsewhere_is_heard_from_one_gateway_that_tells_of_it() -> None:
    """A gateway that is attached and silent, as one of an older release, keeps no other one from telling."""
    turns = Turns(8)
    heard: list[dict[str, float]] = []
    turns.elsewhere = lambda got_ms, num_workers: heard.append(dict(got_ms))  # type: ignore[method-assign]
    async with simulated() as engine, serving(engine, turns=turns) as worker:
        links = [WorkerLink(member_of(worker), name, lambda: None) for name in ("a", "b", "c")]
        try:
            await until(lambda: all(link.usable for link in links))
            for _ in range(3):
                links[1].send_elsewhere({"b": 1.0}, 2)
                links[2].send_elsewhere({"c": 1.0}, 2)
                await links[1].reserve(NOISE)
                await links[2].reserve(NOISE)  # both were read before
            assert heard[-1] == {"b": 1.0}
            assert heard.count({"b": 1.0}) == 3
            assert heard.count({"c": 1.0}) <= 1
        finally:
            await asyncio.gather(*(link.close() for link in links))
