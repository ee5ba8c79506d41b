"""A round of the rollout: what it reads, what it says when it cannot, and when it is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.errors import ConfigError, UnavailableError
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry_operator import __main__ as rollout_main
from kvferry_operator.__main__ import DONE_ROUNDS, IDLE_S, Rollout
from kvferry_operator.kubernetes_api import normal_address, with_own_addresses, worker_counts
from kvferry_operator.lease import DURATION_S, Lease
from kvferry_operator.plan import Blocked, Done, Observed, Pod, SetSpec, Wait
from support.fake_leases import Clock, FakeLeases

CLUSTER = {
    "headGroupSpec": {"template": {"metadata": {"annotations": {"kvferry.io/template": "t"}}}},
    "workerGroupSpecs": [
        {"groupName": "decode", "replicas": 1, "template": {"metadata": {"annotations": {"kvferry.io/template": "t"}}}}
    ],
}
PODS = (
    Pod("h", "h", "head", "t", "10.0.0.1", is_ready=True),
    Pod("d", "d", "decode", "t", "fd00::1", is_ready=True, created_unix_s=1000.0),
)


class FakeApi(FakeLeases):
    """An API server that shows one cluster, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.release = "r1"
        self.digest = "x"
        self.observed: Callable[[], None] = lambda: None
        self.done: list[str] = []
        self.failure: Exception | None = None
        self.said: list[tuple[str, str]] = []
        self.more_pods: tuple[Pod, ...] = ()

    def observe(self) -> Observed:
        if self.failure is not None:
            raise self.failure
        self.observed()
        return Observed(
            wanted=CLUSTER,
            wanted_digest=self.digest,
            actual=CLUSTER,
            actual_digest="x",
            pods=(*PODS, *self.more_pods),
            counts={"decode": 1},
        )

    def set_spec(self, step: SetSpec) -> None:
        self.done.append(step.why)

    def report(self, reason: str, message: str) -> None:
        self.said.append((reason, message))


class FakeMembership:
    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.member = Member(
            kind=MemberKind.DECODE,
            member_id=MemberId("d"),
            address="[fd00:0:0::1]:7000",
            model="m",
            version="0",
            started_unix_s=1010.0,
        )

    async def members(self) -> tuple[Member, ...]:
        if self.failure is not None:
            raise self.failure
        return (self.member,)


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def membership() -> FakeMembership:
    return FakeMembership()


def rollout(api: FakeApi, membership: FakeMembership, folder: Path, **options: Any) -> Rollout:
    return Rollout(api, membership, folder, **options)  # type: ignore[arg-type]


async def test_it_is_done_after_some_rounds_and_not_after_a_failure(
    api: FakeApi, membership: FakeMembership, tmp_path: Path
) -> None:
    (tmp_path / "done").touch()  # of a process before
    rounds = rollout(api, membership, tmp_path)
    for number in range(1, DONE_ROUNDS + 1):
        assert isinstance(await rounds.round(), Done)
        assert (tmp_path / "done").exists() == (number == DONE_ROUNDS)
    api.failure = UnavailableError("the API server does not answer")
    assert await rounds.round() == Wait("the API server does not answer")
    assert not (tmp_path / "done").exists()
    assert (tmp_path / "alive").exists()


async def test_a_release_that_is_not_shown_yet_is_waited_for(
    api: FakeApi, membership: FakeMembership, tmp_path: Path
) -> None:
    rounds = rollout(api, membership, tmp_path, release="r2")
    assert await rounds.round() == Wait("the API server does not show this release yet")
    api.release = "r2"
    assert isinstance(await rounds.round(), Done)


@pytest.mark.parametrize("failure", [KeyError("spec"), TypeError("x"), AttributeError("x"), ValueError("x")])
async def test_objects_that_cannot_be_read_end_nothing(
    api: FakeApi, membership: FakeMembership, tmp_path: Path, failure: Exception
) -> None:
    api.failure = failure
    step = await rollout(api, membership, tmp_path).round()
    assert isinstance(step, Blocked)
    assert step.why == f"the RayService or its RayCluster cannot be read: {type(failure).__name__}"
    assert api.said == [("Blocked", step.why)]


async def test_an_etcd_that_refuses_is_waited_for(api: FakeApi, membership: FakeMembership, tmp_path: Path) -> None:
    membership.failure = ConfigError("membership.user: etcd refuses kvferry with this password")
    assert await rollout(api, membership, tmp_path).round() == Wait(str(membership.failure))


@pytest.mark.parametrize("started_unix_s", [0.0, 900.0, 4e9])
async def test_workers_of_a_pod_that_had_the_address_before_do_not_count(
    api: FakeApi, membership: FakeMembership, tmp_path: Path, started_unix_s: float
) -> None:
    """Whatever the clocks of their nodes say."""
    member = msgspec.structs.replace(membership.member, started_unix_s=started_unix_s)
    for uid, is_counted in (("d", True), ("", True), ("gone", False)):  # empty: of an older release
        membership.member = msgspec.structs.replace(member, pod_uid=uid)
        step = await rollout(api, membership, tmp_path).round()
        assert (step == Wait("decode: 0 of 1 workers are registered")) is not is_counted
        assert isinstance(step, Done) is is_counted


async def test_one_that_another_has_followed_changes_nothing_more(
    api: FakeApi, membership: FakeMembership, tmp_path: Path
) -> None:
    first = rollout(api, membership, tmp_path, identity="a")
    assert isinstance(await first.round(), Done)
    clock = Clock()
    second = Lease(api, "b", monotonic=clock)
    assert second.take() == "a"
    clock.now_s += DURATION_S
    # The other one takes over after `a` has seen what was there, and before it acts on that.
    api.digest = "y"
    taken = []
    api.observed = lambda: taken.append(second.take())
    assert await first.round() == Wait("another rollout of this release has just acquired its Lease")
    assert taken == [""]
    assert api.done == []
    step = await first.round()
    assert isinstance(step, Wait)
    assert step.why.startswith("b rolls this release out: ")
    assert api.done == []


async def test_one_of_another_release_lets_the_next_one_act(
    api: FakeApi, membership: FakeMembership, tmp_path: Path
) -> None:
    first = rollout(api, membership, tmp_path, identity="a", release="r1")
    second = rollout(api, membership, tmp_path, identity="b", release="r2")
    api.digest = "y"
    assert isinstance(await first.round(), SetSpec)
    api.release = "r2"
    step = await second.round()
    assert isinstance(step, Wait)
    assert "a rolls this release out" in step.why
    assert await first.round() == Wait("the API server does not show this release yet")
    assert isinstance(await second.round(), SetSpec)
    assert len(api.done) == 2


async def test_one_that_ends_lets_the_next_one_act(api: FakeApi, membership: FakeMembership, tmp_path: Path) -> None:
    first, second = (rollout(api, membership, tmp_path, identity=name) for name in ("a", "b"))
    await first.round()
    await first.close()
    api.digest = "y"
    assert isinstance(await second.round(), SetSpec)


async def test_one_that_waits_for_another_says_when_all_is_done(
    api: FakeApi, membership: FakeMembership, tmp_path: Path
) -> None:
    first, second = (rollout(api, membership, tmp_path, identity=name) for name in ("a", "b"))
    await first.round()
    for _ in range(DONE_ROUNDS):
        assert isinstance(await second.round(), Done)
    assert (tmp_path / "done").exists()


async def test_a_younger_pod_of_another_role_on_the_same_host_takes_no_worker_away(
    api: FakeApi, membership: FakeMembership, tmp_path: Path
) -> None:
    # On their host's network both have its address.
    api.more_pods = (Pod("p", "p", "prefill", "t", "fd00::1", created_unix_s=5000.0),)
    step = await rollout(api, membership, tmp_path).round()
    assert step != Wait("decode: 0 of 1 workers are registered")


def test_addresses_are_compared_and_not_their_spelling() -> None:
    assert normal_address("[fd00:0:0::1]") == normal_address("fd00::1") == "fd00::1"
    assert normal_address("10.0.0.1") == "10.0.0.1"
    assert normal_address("a-host") == "a-host"


def test_counts_are_those_of_serve_s_deployments() -> None:
    assert worker_counts("") == {}
    text = "applications: [{deployments: [{name: DecodeWorker, num_replicas: 3}, {name: Gateway}, {name: Other}]}]"
    assert worker_counts(text) == {"decode": 3, "gateway": 1}


def test_an_address_is_that_of_the_youngest_pod_that_has_it() -> None:
    """On a host's network all pods have the host's: one that failed there, and its successor."""
    failed = Pod("d-1", "1", "decode", "t", "10.0.0.1", created_unix_s=1000.0)
    present = Pod("d-2", "2", "decode", "t", "10.0.0.1", is_ready=True, created_unix_s=2000.0)
    elsewhere = Pod("p", "p", "prefill", "t", "10.0.0.1", created_unix_s=500.0)
    waiting = [Pod(name, name, "decode", "t", created_unix_s=3000.0) for name in ("d-3", "d-4")]
    for pods in ([failed, present, elsewhere, *waiting], [*waiting, elsewhere, present, failed]):
        addresses = {pod.name: pod.address for pod in with_own_addresses(pods)}
        assert addresses == {"d-1": "", "d-2": "10.0.0.1", "d-3": "", "d-4": "", "p": "10.0.0.1"}


async def test_a_pod_is_idle_after_a_while_without_a_worker(
    api: FakeApi, membership: FakeMembership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    idle: list[frozenset[str]] = []

    def wait(seen: Observed) -> Wait:
        idle.append(seen.idle)
        return Wait("more")

    monkeypatch.setattr(rollout_main, "next_step", wait)
    rounds = rollout(api, membership, tmp_path, monotonic=clock)
    address = membership.member.address
    for seconds, registered in ((0, True), (IDLE_S, False), (IDLE_S - 1, False), (1, False), (0, True), (1, False)):
        clock.now_s += seconds
        membership.member = msgspec.structs.replace(
            membership.member, address=address if registered else "10.9.9.9:7000"
        )
        await rounds.round()
    assert [("d" in each) for each in idle] == [False, False, False, True, False, False]
