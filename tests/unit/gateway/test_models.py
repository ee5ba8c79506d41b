"""Which model and which workers a name leads to, for whom."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from msgspec import structs

from kvferry import config as configuration
from kvferry.engine.base import RenderedPrompt, RenderOutcomes, Sampling
from kvferry.errors import InvalidRequest, ModelNotFound, NoDecodeWorker, NotReady
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.models import MAX_NAMED, Models
from kvferry.link.identity import Identity
from kvferry_sim import SimRenderer
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


async def started(**make: Any) -> tuple[Served, list[str]]:
    """Models with an entry of revision 1 that has workers, and the pools of its revisions 1 to 3."""
    served = Served(models=[revision(1)])
    pools = [configuration.parse(changed(served, number)).entry("a").pool for number in (1, 2, 3)]
    served.with_workers = {pools[0]}
    for name, function in make.items():
        setattr(served.models, f"_{name}", function)
    await served.models.identify()
    await served.models.load()
    return served, pools


def revision(number: int) -> dict[str, Any]:
    return {"name": "a", "model": {"path": "x", "revision": str(number)}}


def changed(served: Served, number: int) -> dict[str, Any]:
    return {**served.config.model_dump(), "models": [revision(number)]}


async def test_a_change_that_is_taken_back_leaves_the_model_that_answers() -> None:
    served, pools = await started()
    await until(lambda: not served.models.missing())
    before = served.models.route("a", tenant()).model
    for number in (2, 1):
        served.models.apply(configuration.parse(changed(served, number)))
        route = served.models.route("a", tenant())
        assert (route.pool, route.model) == (pools[0], before)
        with route.model.rendering():
            pass
    await served.models.close()


async def test_of_two_changes_the_model_that_has_workers_answers_on() -> None:
    served, pools = await started()
    await until(lambda: not served.models.missing())
    for number in (2, 3):
        served.models.apply(configuration.parse(changed(served, number)))
        assert served.route("a") == ("a", pools[0])
    served.with_workers.add(pools[2])
    await until(lambda: served.route("a") == ("a", pools[2]))
    assert len(tuple(served.models)) == 2, "the default model, and this one"
    await served.models.close()


async def test_outcomes_of_models_that_are_gone_still_count() -> None:
    class Counting(SimRenderer):
        @property
        def outcomes(self) -> RenderOutcomes:
            return RenderOutcomes(grammars={"ok": 2, "late": 0}, images={"kept": 1})

    served, pools = await started(make_renderer=lambda config, folder: Counting(512))
    await until(lambda: not served.models.missing())
    assert served.models.outcomes().grammars == {"ok": 4, "late": 0}
    served.models.apply(configuration.parse(changed(served, 2)))
    served.with_workers.add(pools[1])
    await until(lambda: served.route("a") == ("a", pools[1]))
    assert served.models.outcomes() == RenderOutcomes(grammars={"ok": 6, "late": 0}, images={"kept": 3})
    await served.models.close()


async def test_a_model_that_comes_back_while_its_load_is_cancelled_is_loaded() -> None:
    files: list[str] = []

    def make_renderer(config: configuration.ClusterConfig, folder: str) -> SimRenderer:
        if config.model.path == "x" and not files:
            raise OSError("not there yet")
        return SimRenderer(512)

    served, _ = await started(make_renderer=make_renderer)
    served.with_workers = set()
    for number in (2, 1):
        served.models.apply(configuration.parse(changed(served, number)))
    # Added and removed before its load has begun.
    for models in ([], [revision(3)], [], [revision(3)]):
        served.models.apply(configuration.parse({**served.config.model_dump(), "models": models}))
    files.append("x")
    await until(lambda: not served.models.missing())
    await served.models.close()


async def test_what_a_cancelled_load_made_is_closed() -> None:
    made: list[SimRenderer] = []
    closed: list[SimRenderer] = []
    may_go_on = threading.Event()

    class Closing(SimRenderer):
        async def close(self) -> None:
            closed.append(self)

    def make_renderer(config: configuration.ClusterConfig, folder: str) -> SimRenderer:
        if config.model.path == "x":
            made.append(Closing(512))
            assert may_go_on.wait(30)
            return made[-1]
        return SimRenderer(512)

    served, _ = await started(make_renderer=make_renderer)
    await until(lambda: bool(made))
    served.models.apply(configuration.parse({**served.config.model_dump(), "models": []}))
    may_go_on.set()
    await until(lambda: closed == made)
    await served.models.close()
    assert len(closed) == 1


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
