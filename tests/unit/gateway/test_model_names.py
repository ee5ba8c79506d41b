"""Which names a tenant may use, and the pool behind each."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import config as configuration
from kvferry.errors import NoDecodeWorker
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.models import ModelNames

NAMES = ["m", "x", "y", "z"]
POOLS = ["a", "b", "c", "gone"]


@given(
    dedicated=st.lists(st.booleans(), min_size=3, max_size=3),
    has_name=st.lists(st.booleans(), min_size=3, max_size=3),
    pool=st.sampled_from(["", *POOLS]),
)
def test_a_contract_decides_alone_and_a_dedicated_pool_takes_no_other_tenant(
    dedicated: list[bool], has_name: list[bool], pool: str
) -> None:
    sections = {
        name: {"dedicated": alone, "served_name": NAMES[i + 1] if named else ""}
        for i, (name, alone, named) in enumerate(zip(POOLS, dedicated, has_name, strict=False))
    }
    models = ModelNames(configuration.parse({"model": {"served_name": "m"}, "pools": sections}))
    tenant = Tenant("t", pool=pool, secret=bytes(32))
    if pool == "gone":
        with pytest.raises(NoDecodeWorker, match="served by pool 'gone', and this gateway's configuration has no such"):
            models.of(tenant)
        return
    for name, (i, own) in itertools.product(NAMES, enumerate(POOLS[:3])):
        allowed = models.of(tenant)
        if name not in allowed:
            continue
        chosen = allowed[name]
        assert chosen == pool or not pool
        if chosen == own:
            assert pool == own or (not dedicated[i] and name == NAMES[i + 1])
    assert models.of(tenant)["m"] == pool
