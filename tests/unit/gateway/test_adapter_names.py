"""Which adapters a tenant may ask for, and by which names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import config as configuration
from kvferry.config import MAX_ADAPTERS
from kvferry.errors import ModelNotFound, NoDecodeWorker
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.models import AdapterNames, Models
from kvferry.link.identity import Identity
from kvferry_sim import SimRenderer

POOLS = {"fast": {"served_name": "m-fast"}, "bank": {"served_name": "m-bank", "dedicated": True}}
SERVED = {
    "sql": {"path": "/adapters/sql"},
    "ours": {"path": "/adapters/ours", "tenants": ["acme", "globex"]},
    "theirs": {"path": "owner/theirs", "tenants": ["initech"]},
}


def names(served: dict[str, Any]) -> AdapterNames:
    config = configuration.parse(
        {
            "engine": {"kind": "sim"},
            "model": {"served_name": "m"},
            "pools": POOLS,
            "models": [{"name": "second", "model": {"aliases": ["also"]}}],
            "adapters": {"served": served},
        }
    )
    models = Models(
        config,
        "m",
        make_renderer=lambda config, folder: SimRenderer(512),
        make_identity=lambda config, folder: Identity(config.name),
        has_workers=lambda pool: True,
        on_change=lambda: None,
    )
    return AdapterNames(models, config.adapters)


def tenant(name: str, pool: str = "") -> Tenant:
    return Tenant(name, pool=pool, secret=bytes(32))


@pytest.mark.parametrize(
    ("who", "listed"),
    [
        (tenant("acme"), {"sql": "m", "ours": "m"}),
        (tenant("initech"), {"sql": "m", "theirs": "m"}),
        (tenant("other"), {"sql": "m"}),
        (tenant("acme", "bank"), {"sql": "m", "ours": "m"}),
        (tenant("acme", "second"), {}),
    ],
)
def test_adapters_are_listed_for_those_who_may_use_them(who: Tenant, listed: dict[str, str]) -> None:
    assert names(SERVED).of(who) == listed


@given(
    model=st.sampled_from(["", "m", "m-fast", "m-bank", "n", ":", "second", "also"]),
    adapter=st.sampled_from(["", "sql", "ours", "theirs", "none", "sql@00"]),
    who=st.sampled_from(["acme", "initech", "other"]),
    pool=st.sampled_from(["", "bank"]),
)
def test_a_name_is_a_model_or_an_adapter_of_one_that_the_tenant_may_use(
    model: str, adapter: str, who: str, pool: str
) -> None:
    adapters, someone = names(SERVED), tenant(who, pool)
    of_default = ["m", "m-bank"] if pool else ["m", "m-fast"]
    models = of_default if pool else [*of_default, "second", "also"]
    may_use = adapter == "sql" or (adapter, who) in {("ours", "acme"), ("theirs", "initech")}
    for name, of_model in ((f"{model}:{adapter}", model), (adapter, "m")):
        if of_model in of_default and may_use:
            assert adapters.resolve(name, someone) == (of_model, adapter)
            continue
        with pytest.raises(ModelNotFound) as caught:
            adapters.resolve(name, someone)
        served = ", ".join([*models, *adapters.of(someone)])
        assert caught.value.message == f"the model {name!r} does not exist; served here: {served}"
        assert caught.value.param == "model"
    assert [adapters.resolve(name, someone) for name in models] == [(name, "") for name in models]


def test_an_adapter_of_another_tenant_is_refused_as_an_unknown_one() -> None:
    adapters = names(SERVED)
    messages = []
    for name in ("theirs", "nobody"):
        with pytest.raises(ModelNotFound) as caught:
            adapters.resolve(name, tenant("acme"), param=None)
        messages.append(caught.value.message.replace(name, "X"))
    assert messages[0] == messages[1]


def test_a_tenant_of_another_model_hears_of_no_adapter() -> None:
    with pytest.raises(ModelNotFound, match=r"served here: second, also$"):
        names(SERVED).resolve("sql", tenant("acme", "second"))


def test_without_adapters_a_name_is_left_to_models() -> None:
    assert names({}).resolve("anything:else", tenant("acme")) == ("anything:else", "")


def test_an_error_names_a_few_of_many() -> None:
    many = {f"adapter-{i:02}-{'x' * 50}": {"path": "/a"} for i in range(MAX_ADAPTERS)}
    with pytest.raises(ModelNotFound, match=rf" and {MAX_ADAPTERS + 4 - 16} more$"):
        names(many).resolve("none", tenant("acme"))


def test_a_tenant_of_a_pool_that_is_not_there_has_no_adapter_either() -> None:
    for name, adapter in itertools.product(("", "m:"), ("sql", "none")):
        with pytest.raises(NoDecodeWorker, match="no such pool"):
            names(SERVED).resolve(f"{name}{adapter}", tenant("acme", "gone"))
