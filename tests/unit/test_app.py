"""The composition root: what a configuration becomes, and what of it decides whether replicas are replaced."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve import Application

from kvferry import app
from kvferry import config as configuration
from kvferry.errors import ConfigError, KvferryError
from kvferry.hub_model import marker
from kvferry.util import satellites


def values(**changes: Any) -> dict[str, Any]:
    return {"engine": {"kind": "sim"}, "membership": {"endpoints": ["etcd:2379"]}, **changes}


async def test_an_engine_starts_on_a_node_without_the_package_of_keepers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(satellites, "entry_points", lambda **_: ())
    satellites._load.cache_clear()
    await app.ensure_keeper({})
    assert "this node's keeper does not serve: tier.volumes: keepers are the package kvferry-keeper" in caplog.text


def deployments(application: Application) -> dict[str, Any]:
    """name -> deployment, of everything that is bound into it."""
    found = {}
    waiting = [application]
    while waiting:
        deployment = waiting.pop()._bound_deployment
        found[deployment.name] = deployment
        waiting.extend(each for each in deployment.init_args if isinstance(each, Application))
    return found


def build(**changes: Any) -> dict[str, Any]:
    return deployments(app.application({"config": values(**changes), "model_folder": "/models/m"}))


def test_every_role_becomes_a_deployment_with_its_count_and_its_place() -> None:
    built = build(
        prefill={"replicas": 2, "num_gpus": 4, "resources": {"kvferry_prefill": 1}},
        decode={"replicas": 3, "num_cpus": 2},
        gateway={"replicas": 2, "resources": {"kvferry_gateway": 1}},
    )
    assert {name: each.num_replicas for name, each in built.items()} == {
        "PrefillWorker": 2,
        "DecodeWorker": 3,
        "Gateway": 2,
    }
    assert built["PrefillWorker"].ray_actor_options["num_gpus"] == 4
    assert built["PrefillWorker"].ray_actor_options["resources"] == {"kvferry_prefill": 1}
    assert built["Gateway"].ray_actor_options["resources"] == {"kvferry_gateway": 1}
    # Not the job's that deploys.
    assert {str(each.ray_actor_options["runtime_env"]) for each in built.values()} == {"{'working_dir': None}"}
    assert built["Gateway"].user_config == {"prefill": 2, "decode": 3}
    assert {each.init_args[1] for each in built.values()} == {"/models/m"}


def test_replicas_wait_for_a_model_that_a_job_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_model = {"name": "acme/tiny", "revision": "v1"}
    arguments = {"config": values(), "model_folder": str(tmp_path / "m")}
    without, waiting = (deployments(app.application({**arguments, **more})) for more in ({}, {"hub_model": hub_model}))
    assert {str(each.init_kwargs) for each in without.values()} == {"{}"}
    assert all(each.init_kwargs == {"hub_model": hub_model} for each in waiting.values())
    assert without["DecodeWorker"].version != waiting["DecodeWorker"].version

    async def fill_while_it_waits() -> None:
        monkeypatch.setattr(app, "FILL_PERIOD_S", 0.01)
        await app._until_filled(str(tmp_path / "m"), None)
        wait = asyncio.create_task(app._until_filled(str(tmp_path / "m"), hub_model))
        done, _ = await asyncio.wait([wait], timeout=0.05)
        assert not done
        staging = tmp_path / "staging"
        staging.mkdir()
        (staging / "config.json").write_text("{}")
        marker.write(staging, marker.Marker("acme/tiny", "v1", "c0ffee", {"config.json": 2}))
        staging.rename(tmp_path / "m")
        await asyncio.wait_for(wait, 10)

    asyncio.run(fill_while_it_waits())


@pytest.mark.parametrize("role", ["prefill", "gateway"])
def test_a_role_without_replicas_has_no_deployment(role: str) -> None:
    missing = {"prefill": "PrefillWorker", "gateway": "Gateway"}[role]
    assert set(build(**{role: {"replicas": 0}})) == {"PrefillWorker", "DecodeWorker", "Gateway"} - {missing}


def test_counts_and_placement_change_no_version_and_everything_else_does() -> None:
    def versions(**changes: Any) -> set[tuple[str, Any]]:
        return {(each.version, str(each.init_args[:2])) for each in build(**changes).values()}

    before = versions()
    assert len(before) == 1
    assert versions(decode={"replicas": 7}, prefill={"replicas": 3}, gateway={"replicas": 2}) == before
    assert versions(decode={"num_gpus": 1, "resources": {"x": 1}}, gateway={"num_cpus": 2}) == before
    assert versions(decode={"engine": {"max_num_seqs": 8}}) != before
    assert versions(prefill={"replicas": 0}) != before
    assert versions(log_level="DEBUG") != before


ALPHA: dict[str, Any] = {"name": "alpha", "model": {"path": "/models/alpha"}, "decode": {"replicas": 2}}
BETA: dict[str, Any] = {"name": "beta", "model": {"path": "/models/beta"}, "prefill": {"replicas": 0}}


def test_each_model_has_deployments_whose_versions_know_of_no_other_model() -> None:
    built = build(models=[ALPHA, BETA])
    assert {name: each.num_replicas for name, each in built.items()} == {
        "PrefillWorker": 1,
        "DecodeWorker": 1,
        "Gateway": 1,
        "PrefillWorker-alpha": 1,
        "DecodeWorker-alpha": 2,
        "DecodeWorker-beta": 1,
    }
    alpha = built["DecodeWorker-alpha"]
    assert alpha.init_args[1] == "/models/alpha"
    pool = configuration.parse(values(models=[ALPHA])).entry("alpha").pool
    assert alpha.init_kwargs == {"pool": "alpha", "member_pool": pool}
    named = {**ALPHA, "engine": {"args": {"watermark": 0.1}}}
    engine = build(models=[BETA, named])["DecodeWorker-alpha"]
    assert engine.init_kwargs["argument_keys"] == {"watermark": "models[alpha].engine.args.watermark"}

    def versions(**changes: Any) -> dict[str, tuple[str, str]]:
        return {name: (each.version, str(each.init_args[:2])) for name, each in build(**changes).items()}

    before = versions(models=[ALPHA, BETA])
    shares = {**ALPHA, "model": {**ALPHA["model"], "aliases": ["a"], "canary": {"beta": 5}}}
    assert versions(models=[shares, BETA], model={"aliases": ["d"], "canary": {"alpha": 1}}) == before
    assert versions(models=[{**ALPHA, "decode": {"replicas": 7}}, BETA]) == before
    assert versions() == {name: before[name] for name in ("PrefillWorker", "DecodeWorker", "Gateway")}
    for changed in ({**BETA, "model": {"path": "/other"}}, {**BETA, "engine": {"block_size": 16}}):
        after = versions(models=[ALPHA, changed])
        assert {name for name in before if after[name] != before[name]} == {"DecodeWorker-beta"}


def test_an_entry_alone_has_the_deployments_that_it_has_among_others() -> None:
    together = build(models=[ALPHA, BETA])

    def alone(**args: Any) -> dict[str, Any]:
        return deployments(app.application({"config": values(models=[ALPHA]), "entry": "alpha", **args}))

    assert {name: each.num_replicas for name, each in alone().items()} == {
        "PrefillWorker-alpha": 1,
        "DecodeWorker-alpha": 2,
    }
    for name, each in alone().items():
        assert each.version == together[name].version
        assert each.init_args[:2] == together[name].init_args[:2]
        assert each.init_kwargs == together[name].init_kwargs
    hub_model = {"name": "acme/alpha", "revision": "v1"}
    waiting = alone(hub_model=hub_model, model_folder="/weights/alpha")["DecodeWorker-alpha"]
    assert waiting.init_args[1] == "/weights/alpha"
    assert waiting.init_kwargs["hub_model"] == hub_model
    assert waiting.version != together["DecodeWorker-alpha"].version


def test_a_gateway_follows_models_that_its_replica_was_not_made_with() -> None:
    tier = {"enabled": True, "volumes": [{"path": "/v", "capacity_gib": 1, "pool": "beta"}]}
    sections = {
        "models": [{**ALPHA, "model": {"path": "/models/alpha", "canary": {"beta": 5}}}, BETA],
        "model": {"path": "/models/m", "aliases": ["d"]},
        "pools": {"p": {"decode": {"replicas": 3}}},
        "prefill": {"replicas": 4},
        "tier": tier,
    }
    wanted = configuration.parse(values(**sections))
    gateway = build(**sections)["Gateway"]
    made = configuration.parse(app.gateway_values(gateway.init_args[0], gateway.user_config))
    for key in ("models", "model", "tier", "engine", "prefill", "decode", "pools"):
        assert getattr(made, key) == getattr(wanted, key), key
    # The same replica, after a change.
    later = build(**{**sections, "models": [BETA]})["Gateway"]
    assert later.version == gateway.version
    made = configuration.parse(app.gateway_values(gateway.init_args[0], later.user_config))
    assert [entry.name for entry in made.models] == ["beta"]


def test_a_replica_gets_a_configuration_that_parses() -> None:
    config = configuration.parse(values(decode={"replicas": 7, "num_gpus": 1, "engine": {"max_num_seqs": 8}}))
    kept = configuration.parse(app.replica_values(config))
    assert (kept.decode.replicas, kept.decode.num_gpus) == (1, 0)
    assert kept.engine_of("decode").max_num_seqs == 8
    assert kept.engine_of("prefill") == config.engine


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"config": values(), "model": "x"},
            "args: unknown key 'model'. Allowed here: config, entry, hub_model, model_folder",
        ),
        ({"config": values(), "hub_model": "a/b"}, "args.hub_model: expected {name: ..., revision: ...}, two texts"),
        ({"config": values(), "hub_model": {"name": "a/b", "revision": ""}}, "args.hub_model: expected {name:"),
        ({}, "args.config: expected a mapping of sections, not None"),
        ({"config": values(), "model_folder": 3}, "args.model_folder: expected a folder or a hub id, not 3"),
        ({"config": values(), "entry": "b"}, "args.entry: 'b' is no entry of args.config.models: none"),
        ({"config": values(models=[ALPHA]), "entry": ["b"]}, "is no entry of args.config.models: alpha"),
        (
            {
                "config": values(models=[{**ALPHA, **{key: {"replicas": 0} for key in ("prefill", "decode")}}]),
                "entry": "alpha",
            },
            "all are 0",
        ),
        ({"config": {"engine": {"kind": "sim"}}}, "membership.endpoints: etcd's addresses are needed to deploy"),
        ({"config": values(decode={"replica": 2})}, "decode.replica: unknown key (value 2); did you mean 'replicas'?"),
        ({"config": values(**{role: {"replicas": 0} for role in ("prefill", "decode", "gateway")})}, "all are 0"),
    ],
)
def test_bad_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app.application(args)
    assert message in caught.value.message


def test_without_a_model_folder_the_path_of_the_configuration_counts() -> None:
    built = deployments(app.application({"config": values(model={"path": "org/model"})}))
    assert {each.init_args[1] for each in built.values()} == {"org/model"}


POOLS = {"finance": {"prefill": {"replicas": 2, "num_gpus": 1}, "decode": {"resources": {"kvferry_finance": 1}}}}


def test_a_pool_has_deployments_of_its_own_and_changes_none_of_the_others_names() -> None:
    built = build(pools={**POOLS, "b": {"prefill": {"replicas": 0}}})
    assert {name: each.num_replicas for name, each in built.items()} == {
        "PrefillWorker": 1,
        "DecodeWorker": 1,
        "PrefillWorker-finance": 2,
        "DecodeWorker-finance": 1,
        "DecodeWorker-b": 1,
        "Gateway": 1,
    }
    assert built["PrefillWorker-finance"].ray_actor_options["num_gpus"] == 1
    assert built["DecodeWorker-finance"].ray_actor_options["resources"] == {"kvferry_finance": 1}
    assert built["DecodeWorker-finance"].init_kwargs == {"pool": "finance"}
    assert built["DecodeWorker"].init_kwargs == {}
    assert built["Gateway"].user_config == {
        "prefill": 1,
        "decode": 1,
        "pools": {"finance": {"prefill": 2, "decode": 1}, "b": {"prefill": 0, "decode": 1}},
    }


def test_counts_and_placement_of_a_pool_change_no_version() -> None:
    def versions(**changes: Any) -> set[str]:
        return {each.version for each in build(pools={"finance": changes}).values()}

    before = versions()
    assert versions(decode={"replicas": 7, "num_gpus": 1, "resources": {"x": 1}}) == before
    assert versions(decode={"engine": {"max_num_seqs": 8}}) != before


def test_a_cluster_may_have_pools_only() -> None:
    none = {role: {"replicas": 0} for role in ("prefill", "decode", "gateway")}
    assert set(build(**none, pools=POOLS)) == {"PrefillWorker-finance", "DecodeWorker-finance"}


def test_a_worker_refuses_a_quality_report_before_it_waits_for_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The constructor's error is the deployment's message, in `serve status` and in the RayService.
    monkeypatch.setattr(app, "_in_replica", configuration.parse)
    asked = values(engine={"kind": "vllm", "quality_report": str(tmp_path / "none.json")})
    start = app.DecodeWorker.__init__(
        SimpleNamespace(kind=app.DecodeWorker.kind),
        asked,
        str(tmp_path / "no model"),
        hub_model={"name": "a/b", "revision": "r"},
    )  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=r"engine\.quality_report: .*none\.json cannot be read"):
        asyncio.run(start)


def serve_says(
    monkeypatch: pytest.MonkeyPatch, *states: tuple[str, str], trigger: str = "REPLICA_STARTUP_FAILED"
) -> None:
    """Let Serve have a deployment with each state and message in turn, and the last one for ever."""
    waiting = list(states)

    def status() -> Any:
        state, message = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        of_worker = {"RUNNING": "HEALTHY", "DEPLOYING": "UPDATING"}.get(state, state)
        workers = SimpleNamespace(
            message=message, status=SimpleNamespace(value=of_worker), status_trigger=SimpleNamespace(value=trigger)
        )
        gateway = SimpleNamespace(
            message="",
            status=SimpleNamespace(value="HEALTHY"),
            status_trigger=SimpleNamespace(value="CONFIG_UPDATE_COMPLETED"),
        )
        application = SimpleNamespace(
            status=SimpleNamespace(value=state), message="", deployments={"DecodeWorker": workers, "Gateway": gateway}
        )
        return SimpleNamespace(applications={app.APPLICATION: application})

    monkeypatch.setattr(app.serve, "status", status)
    monkeypatch.setattr(app, "STATUS_PERIOD_S", 0.01)


RETRYING = (
    "A replica failed to start with exception. Retrying 2 more time(s). Error:\nkvferry.errors.X: engine.args.seed: no"
)


def test_a_wait_tells_each_cause_once_and_ends_when_serve_gives_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_says(
        monkeypatch, ("DEPLOYING", ""), *[("DEPLOYING", RETRYING)] * 3, ("UNHEALTHY", "a"), ("DEPLOY_FAILED", RETRYING)
    )
    with pytest.raises(KvferryError) as caught:
        app._wait_running(time.monotonic() + 60)
    assert caught.value.message.startswith(
        "Ray Serve has given up: the application is DEPLOY_FAILED: DecodeWorker: engine.args.seed: no ("
    )
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("not healthy yet: DecodeWorker: engine.args.seed: no (")
    assert second == "not healthy yet: DecodeWorker: a"


def test_a_wait_goes_on_while_serve_mends_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_says(monkeypatch, ("UNHEALTHY", "a"), ("DEPLOYING", ""), ("RUNNING", ""))
    app._wait_running(time.monotonic() + 60)


def test_a_wait_goes_on_where_a_replica_that_ran_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ("DEPLOYING", ""), ("DEPLOY_FAILED", "A replica's health check failed."), ("RUNNING", "")
    serve_says(monkeypatch, *states, trigger="HEALTH_CHECK_FAILED")
    app._wait_running(time.monotonic() + 60)


def test_a_wait_that_is_over_tells_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_says(monkeypatch, ("UNHEALTHY", RETRYING))
    with pytest.raises(KvferryError, match=r"still UNHEALTHY: DecodeWorker: engine\.args\.seed: no"):
        app._wait_running(time.monotonic())
