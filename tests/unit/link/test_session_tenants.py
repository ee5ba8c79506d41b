"""What a session tells its gateway of tenants."""

from __future__ import annotations

from kvferry.engine.base import EngineRequest, RequestId, Sampling, Turn
from kvferry.link import tenants
from kvferry.link.tenants import SessionTenants, TenantMeter
from kvferry.wire.v1 import worker_pb2 as pb


def told(session: SessionTenants, now_s: float, **served_ms: float) -> dict[str, tuple[float, int, int, int]]:
    load = pb.Load()
    session.add_served(load, served_ms, now_s)
    return {each.tenant: (each.ms, each.num_requests, each.num_tokens, each.num_running) for each in load.served}


def request_of(num_tokens: int, *, is_resumed: bool = False) -> EngineRequest:
    return EngineRequest(
        RequestId("r"), [1] * num_tokens, Sampling(max_tokens=1), is_resumed=is_resumed, turn=Turn("acme", 1.0)
    )


def session_of(meter: TenantMeter | None) -> SessionTenants:
    return SessionTenants(lambda number: True, meter)


def test_a_gateway_hears_of_the_requests_of_others_and_of_all_answers() -> None:
    meter = TenantMeter()
    first, second = session_of(meter), session_of(meter)
    first.begin(request_of(100))
    first.begin(request_of(50, is_resumed=True))
    second.begin(request_of(7))
    assert told(first, 1.0) == {"acme": (0.0, 1, 7, 1)}
    assert told(second, 1.0) == {"acme": (0.0, 1, 100, 2)}
    first.end(request_of(1), 40)
    assert told(first, 2.0) == {"acme": (0.0, 1, 47, 1)}
    assert told(second, 2.0) == {"acme": (0.0, 1, 140, 1)}
    second.end(request_of(1), 3)
    first.end(request_of(1), 0)
    assert told(first, 3.0) == {"acme": (0.0, 1, 50, 0)}
    assert told(first, 4.0) == {}, "nothing changed"


def test_what_was_before_a_session_is_not_of_it() -> None:
    meter = TenantMeter()
    first = session_of(meter)
    first.begin(request_of(100))
    first.end(request_of(1), 20)
    late = session_of(meter)
    assert told(late, 1.0) == {"acme": (0.0, 0, 0, 0)}
    first.begin(request_of(30))
    assert told(late, 2.0) == {"acme": (0.0, 1, 30, 1)}


def test_prefill_workers_count_no_requests() -> None:
    session = session_of(None)
    session.begin(request_of(100))
    session.end(request_of(1), 5)
    assert told(session, 1.0, acme=3.5) == {"acme": (3.5, 0, 0, 0)}


def test_every_busy_tenant_has_its_turn_in_reports() -> None:
    session = session_of(None)
    names = [f"t{number}" for number in range(200)]
    heard: set[str] = set()
    for report in range(4):
        part = told(session, float(report + 1), **dict.fromkeys(names, 10.0 * report + 1.0))
        assert len(part) == tenants.MAX_SERVED
        heard |= part.keys()
    assert heard == set(names)


def test_a_meter_forgets_idle_tenants_first() -> None:
    meter = TenantMeter()
    meter.begin("busy", 5, is_resumed=False)
    for number in range(tenants.MAX_TENANTS + 50):
        meter.begin(f"t{number}", 1, is_resumed=False)
        meter.end(f"t{number}", 1)
    assert len(meter) == tenants.MAX_TENANTS
    assert meter.of("busy").num_running == 1
    meter.end("busy", 2)
    session = session_of(meter)
    assert len(told(session, 1.0)) == tenants.MAX_SERVED
