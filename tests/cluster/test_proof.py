"""Transfers that are not proven: decode workers compute prompts, and the reason is in sight."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import httpx
import pytest

from kvferry.gateway.models import Models
from kvferry.membership.base import MemberKind
from kvferry.proof.certificates import Certificate, Certificates, Way, kind_of
from kvferry.proof.prover import Prover
from kvferry.proof.verdict import Outcome
from kvferry.router.placement import Reason
from support.waiting import until

from .conftest import SimCluster, running
from .test_compatibility import ask, readiness


@pytest.fixture(autouse=True)
def simulated_engines_need_a_proof() -> Iterator[None]:
    """They have no pages of which anything could be proven, so nobody proves it."""
    with (
        mock.patch.object(Models, "proof_of", return_value="required"),
        mock.patch.object(Prover, "_next", return_value=None),
    ):
        yield


async def write(cluster: SimCluster, outcome: Outcome, reason: str = "") -> None:
    """As another gateway does at the end of a proof."""
    prefill, decode = (kind_of(cluster.hosts(kind)[0].member) for kind in (MemberKind.PREFILL, MemberKind.DECODE))
    certificate = Certificate(prefill=prefill, decode=decode, way=Way.TRANSFER, outcome=outcome, reason=reason)
    assert cluster.gateway is not None
    records = cluster.gateway._membership.records
    before = await records.read(f"proofs/{certificate.key}")
    value = Certificates(None).encode(certificate)
    assert await records.write(f"proofs/{certificate.key}", value, before.revision if before is not None else 0)


async def reason_of(cluster: SimCluster) -> str:
    answer = await ask(cluster, {"x-kvferry-debug": "disaggregate"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["kvferry"]["reason"])


@pytest.mark.parametrize("placement", ["priced", "round_robin"])
async def test_a_transfer_is_used_once_it_is_proven_and_no_longer_once_it_is_refuted(placement: str) -> None:
    async with running(1, 1, gateway={"placement": placement}) as cluster:
        assert await reason_of(cluster) == Reason.UNPROVEN
        assert cluster.metric('kvferry_placements_total{reason="unproven"}') == 1
        gateway = cluster.gateway
        assert gateway is not None
        (unproven,) = gateway.readiness().unproven
        assert unproven.endswith("not proven yet")
        await write(cluster, Outcome.PROVEN)
        await until(lambda: not gateway.readiness().unproven, what="the proof is known")
        assert await reason_of(cluster) == Reason.DISAGGREGATED
        await write(cluster, Outcome.REFUTED, reason="pages are wrong")
        await until(lambda: bool(gateway.readiness().unproven), what="the refutation is known")
        assert await reason_of(cluster) == Reason.UNPROVEN
        assert (await readiness(cluster))["unproven"][0].endswith("pages are wrong")
        assert cluster.metric('kvferry_transfer_proven{pool="default",way="transfer"}') == 0


async def test_kvferry_explain_says_that_no_transfer_is_proven() -> None:
    async with running(1, 1) as cluster:
        answer = await ask(cluster, {"x-kvferry-debug": "disaggregate"})
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            (explained,) = (await http.get(f"/kvferry/v1/requests/{answer.json()['id']}")).json()["requests"]
        assert "kvferry prove" in explained["unequal_pages"]
