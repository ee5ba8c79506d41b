from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.abuse import ADMITTED_CHOICES, ATTACKS, MOST_CHOICES, PATH, Attacker, Trickle
from bench.isolation import (
    GIVE_UP_S,
    LATE,
    TTFT_S,
    WHOLE_S,
    Innocent,
    Pair,
    Request,
    Window,
    due_in,
    fall,
    goodput,
    p90_ms,
    raise_unexpected,
    read_outcomes,
    result_of,
    ttft_ms,
)
from bench.live_cluster import MODEL, Cluster, config_of, running
from bench.raw_http import Connection, post_head, post_request
from bench.results import BenchFailed
from support.waiting import SOON_S, until


def good(due_s: float) -> Request:
    return Request(due_s, due_s, 200, due_s + 0.1, due_s + 0.2)


def refused(due_s: float) -> Request:
    return Request(due_s, due_s, 429, due_s + 0.1, due_s + 0.1)


def test_late_refused_and_broken_requests_are_no_goodput() -> None:
    late = Request(0.0, 0.0, 200, TTFT_S + 0.01, WHOLE_S - 0.01)
    slow = Request(0.0, 0.0, 200, 0.1, WHOLE_S + 0.01)
    assert goodput([good(0.0), late, slow, refused(0.0), Request(0.0, 0.0)]) == pytest.approx(0.2)


def test_goodput_of_no_request_is_an_error() -> None:
    with pytest.raises(ValueError, match="too short"):
        goodput([])


def test_fall_is_relative_to_the_goodput_alone() -> None:
    half = [good(0.0), refused(0.0)]
    assert fall(half, half) == 0
    assert fall(half, [good(0.0), *[refused(0.0)] * 3]) == pytest.approx(0.5)
    assert fall(half, [good(0.0)]) == pytest.approx(-1)
    with pytest.raises(ValueError, match="even alone"):
        fall([refused(0.0)], half)


def test_requests_belong_to_the_window_in_which_they_were_due() -> None:
    windows = [Window(1.0, 2.0, 0.0), Window(3.0, 4.0, 0.0)]
    requests = [good(due_s) for due_s in (0.9, 1.0, 1.99, 2.0, 2.5, 3.5, 4.0)]
    assert [each.due_s for each in due_in(requests, windows)] == [1.0, 1.99, 3.5]


def test_percentiles_count_from_when_a_request_was_due_and_leave_out_refusals() -> None:
    assert ttft_ms([good(1.0), refused(1.0)], 0.99) == pytest.approx(100)
    assert ttft_ms([refused(1.0)], 0.99) == 0


def test_the_90th_percentile_counts_a_request_without_an_answer_as_given_up() -> None:
    requests = [Request(0.0, 0.0, 200, i / 10, i / 5) for i in range(10)]
    assert p90_ms(requests) == pytest.approx(900)
    assert p90_ms(requests, whole=True) == pytest.approx(1800)
    assert p90_ms([*requests[:-1], refused(0.0)]) == 1e3 * GIVE_UP_S
    assert p90_ms([*requests, *requests, refused(0.0)]) == pytest.approx(900)
    with pytest.raises(ValueError, match="too short"):
        p90_ms([])


def test_refused_and_late_requests_are_measured_beside_an_attack_and_fail_alone() -> None:
    late = Request(0.0, 0.0, fault=LATE, number=7)
    raise_unexpected([good(0.0), refused(0.0), late], "beside", alone=False)
    raise_unexpected([good(0.0)], "alone", alone=True)
    for request, failure in ((refused(0.0), "alone: request 0: 429"), (late, f"alone: request 7: {LATE}")):
        with pytest.raises(BenchFailed, match=failure):
            raise_unexpected([good(0.0), request], "alone", alone=True)
    broken = Request(0.0, 0.0, fault="EOFError", number=3)
    for request, failure in ((broken, "beside: request 3: EOFError"), (Request(0.0, 0.0, 500), "request 0: 500")):
        with pytest.raises(BenchFailed, match=failure):
            raise_unexpected([good(0.0), request], "beside", alone=False)


def test_the_worst_attack_is_the_result() -> None:
    pairs = {
        "mild": Pair([Window(0.0, 1.0, 0.1)], [Window(1.0, 2.0, 0.1)], {"small": Counter(sent=1)}),
        "bad": Pair([Window(2.0, 3.0, 0.1)], [Window(3.0, 4.0, 0.1)]),
    }
    result = result_of(pairs, [good(0.5), good(1.5), good(2.5), good(3.5), refused(3.6)])
    assert result["falls"] == {"mild": 0.0, "bad": 0.5}
    assert result["goodput_fall_max"] == 0.5
    assert (result["p90_vs_alone_mild"], result["answer_p90_vs_alone_mild"]) == (1.0, 1.0)
    assert result["answer_p90_vs_alone_bad"] == pytest.approx(1e3 * GIVE_UP_S / 200)
    assert result["p90_vs_alone_bad"] == pytest.approx(1e3 * GIVE_UP_S / 100)
    assert result["p90_ms"]["mild"] == {"ttft": [100.0, 100.0], "answer": [200.0, 200.0]}
    assert result["attacks"] == {"mild": {"small": {"sent": 1}}, "bad": {}}
    assert result["innocent_statuses"]["bad"] == {"200": 1, "429": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with running(config_of(max_requests=1024), 1) as cluster:
        yield cluster


async def key_of(cluster: Cluster, tenant: str) -> str:
    await cluster.admin.create(tenant)
    key = await cluster.admin.add_key(tenant, "test")
    port = cluster.gateways[0].port
    request = post_request(port, PATH, key, {"model": MODEL, "prompt": "hi", "max_tokens": 1})
    with contextlib.closing(Connection(port)) as connection:
        async with asyncio.timeout(SOON_S):
            # Gateways hear of a new key a moment later.
            while (await connection.exchange(request)).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return key


@pytest.mark.asyncio(loop_scope="module")
async def test_choices_are_answered_or_refused_as_labelled(cluster: Cluster) -> None:
    attacker = Attacker(ATTACKS["choices"], [cluster.gateways[0].port], await key_of(cluster, "choices"))
    attacking = asyncio.create_task(attacker.run())
    admission = cluster.gateways[0].admission
    await until(lambda: admission.choices.num_taken == ADMITTED_CHOICES)
    await until(lambda: attacker.counts[f"{MOST_CHOICES} choices"]["429"] > 0)
    await until(lambda: attacker.counts[f"n={MOST_CHOICES}"]["400"] > 0)
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    await until(lambda: not admission.num_in_flight)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["flood", "long", "streams"])
async def test_requests_of_other_attacks_are_answered(cluster: Cluster, name: str) -> None:
    attacker = Attacker(ATTACKS[name], [cluster.gateways[0].port], await key_of(cluster, name))
    attacking = asyncio.create_task(attacker.run())
    labels = [loop.label for loop in ATTACKS[name].loops]
    await until(lambda: all(attacker.counts.get(label, Counter())["200"] > 0 for label in labels))
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    assert all(set(attacker.counts[label]) <= {"sent", "200", "429"} for label in labels)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_trickled_body_is_counted_by_its_bytes_and_its_status(cluster: Cluster) -> None:
    counts: Counter[str] = Counter()
    trickle = Trickle(cluster.gateways[0].port, "no key", counts)
    await trickle.send_byte()  # opens
    await until(lambda: counts["401"] == 1)
    trickle = Trickle(cluster.gateways[0].port, await key_of(cluster, "trickle"), counts)
    for _ in range(3):
        await trickle.send_byte()
    admission = cluster.gateways[0].admission
    await until(lambda: admission.body_bytes.num_taken == 2)
    assert counts == {"sent": 2, "401": 1, "bytes": 2}
    trickle.close()
    await until(lambda: not admission.num_in_flight)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_innocent_alone_has_its_goodput(cluster: Cluster, tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.jsonl"
    with contextlib.closing(
        Innocent(ATTACKS["flood"], [cluster.gateways[0].port], await key_of(cluster, "innocent"), outcomes)
    ) as innocent:
        sending = asyncio.create_task(innocent.run())
        await until(lambda: len(read_outcomes(outcomes)) >= 3)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert {each.status for each in read_outcomes(outcomes)} == {200}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_connection_that_the_server_closed_while_idle_is_opened_again() -> None:
    served: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()
        served.append(writer)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with contextlib.closing(Connection(port)) as connection:
            for number in (1, 2):
                reply = await connection.exchange(post_head(port, PATH, "key", 0))
                assert (reply.status, reply.tail, len(served)) == (200, b"ok", number)
                await until(connection.is_stale)
