"""Which model and which workers a name leads to, for whom."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from kvferry import config as configuration
from kvferry.engine.base import RenderedPrompt, Sampling
from kvferry.engine.sim import SimRenderer
from kvferry.errors import InvalidRequest, ModelNotFound, NoDecodeWorker, NotReady
from kvferry.gateway.models import MAX_NAMED, Models
from kvferry.gateway.tenants import Tenant
from kvferry.link.protocol import Identity
from support.waiting import until

NONE = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}
POOLS = {"fast": {"served_name": "m-fast"}, "bank": {"dedicated": True, "served_name": "m-bank"}}


def tenant(pool: str = "", name: str = "t") -> Tenant:
    return Tenant(name, pool=pool, secret=bytes(32))


class Served:
    """Models of a configuration, with workers of the pools that are said to have some."""

    def __init__(self, **sections: Any) -> None:
        self.with_workers: set[str] = set()
        self.config = configuration.parse({"engine": {"kind": "sim"}, "model": {"served_name": "m"}, **sections})
        self.models = Models(
            self.config,
            "m",
            make_renderer=lambda config, folder: SimRenderer(512),
            make_identity=lambda config, folder: Identity(config.name),
            has_workers=lambda pool: pool in self.with_workers,
            on_change=lambda: None,
        )

    def route(self, name: str, pool: str = "", conversation: bytes = b"") -> tuple[str, str]:
        """Label and pool."""
        route = self.models.route(name, tenant(pool), lambda: conversation)
        return route.model.label, route.pool


async def test_names_lead_to_pools_as_contracts_say() -> None:
    served = Served(models=[{"name": "a", "model": {"aliases": ["b"]}}], pools=POOLS)
    of_a = served.config.entry("a").pool
    assert served.route("m") == ("default", "")
    assert served.route("m-fast") == ("default", "fast")
    assert served.route("a") == served.route("b") == served.route("a", "a") == served.route("b", "a") == ("a", of_a)
    assert served.route("m", "bank") == served.route("m-bank", "bank") == ("default", "bank")
    for name, pool in (("m-bank", ""), ("a", "bank"), ("m", "a"), ("c", ""), (of_a, ""), ("default", "")):
        with pytest.raises(ModelNotFound):
            served.route(name, pool)
    # Such a record is of an earlier release: it is not the default pool, which all share.
    for pool in ("gone", "default"):
        with pytest.raises(NoDecodeWorker, match=f"served by pool '{pool}', and this gateway's configuration has no"):
            served.route("m", pool)
    without_default = Served(**NONE, models=[{"name": "a"}])
    with pytest.raises(ModelNotFound, match=r"served here: a$"):
        without_default.route("m")
    with pytest.raises(NoDecodeWorker):
        without_default.route("a", "gone")


async def test_a_share_leads_to_a_model_that_can_answer() -> None:
    served = Served(model={"served_name": "m", "canary": {"a": 100}}, models=[{"name": "a"}], pools=POOLS)
    of_a = served.config.entry("a").pool
    assert served.route("m") == ("default", ""), "it is not loaded"
    await served.models.identify()
    await served.models.load()
    await until(lambda: not served.models.missing())
    assert served.route("m") == ("default", ""), "it has no workers"
    served.with_workers = {of_a}
    assert served.route("m") == ("a", of_a)
    assert served.route("m-fast") == ("default", "fast"), "who asks for a pool gets it"
    assert served.route("m", "bank") == ("default", "bank")
    await served.models.close()


async def test_a_model_is_not_ready_before_it_is_loaded_and_a_long_list_is_cut() -> None:
    entries = [{"name": f"e{i}", "model": {"aliases": [f"e{i}-{j}" for j in range(8)]}} for i in range(10)]
    served = Served(models=entries)
    with (
        pytest.raises(NotReady, match="this gateway is loading the model 'e3'"),
        served.models.route("e3-1", tenant()).model.rendering(),
    ):
        pass
    assert served.models.of(tenant()) == {}
    with pytest.raises(ModelNotFound) as refused:
        served.route("x" * 1000)
    assert refused.value.message.endswith(f" and {1 + 90 - MAX_NAMED} more")
    assert "x" * 257 not in refused.value.message


@pytest.mark.parametrize(("param", "value"), [("min_p", 0.1), ("logit_bias", {5: 1.0})])
def test_parameters_that_speculating_engines_refuse_are_named_before_a_prompt_is_computed(
    param: str, value: object
) -> None:
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    decode = {"decode": {"engine": {"args": ngram}}}
    served = Served(
        models=[{"name": "a", **decode}, {"name": "b"}], pools={"fast": {"served_name": "m-fast", **decode}}
    )
    sampling = structs.replace(Sampling(max_tokens=1), **{param: value})
    prompts = [RenderedPrompt([1], Sampling(max_tokens=1)), RenderedPrompt([1], sampling)]
    for name, speculates in (("m", False), ("m-fast", True), ("a", True), ("b", False)):
        route = served.models.route(name, tenant())
        route.model.require_supported(prompts[:1], route.pool)
        if not speculates:
            route.model.require_supported(prompts, route.pool)
            continue
        with pytest.raises(InvalidRequest, match="speculative_config") as caught:
            route.model.require_supported(prompts, route.pool)
        assert caught.value.param == param
