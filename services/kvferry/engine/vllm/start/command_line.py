"""The `vllm serve` command that a role's engines amount to, for people."""

from __future__ import annotations

import shlex

from kvferry.arguments.vllm_arguments import SPECULATION, draft_model
from kvferry.config import ClusterConfig
from kvferry.engine.base import EngineId
from kvferry.engine.vllm.start.argument_parser import check_variables, words
from kvferry.engine.vllm.start.arguments import engine_arguments, kv_transfer_config, tier_connector
from kvferry.engine.vllm.start.draft_model import drafts_of_prefill

_LATER = "set-at-start"  # new for each engine, or known only where it runs


def command_line(config: ClusterConfig, role: str, entry: str = "") -> str:
    """Return one option a line, after the variables of `engine.env`. Raises ConfigError for what vLLM refuses."""
    keys = config.argument_keys(role, entry)
    config, pool = config.of_model(entry), entry
    engine, tenants = config.engine_of(role, pool), config.gateway.tenants_in_etcd
    check_variables(engine.env)
    tiers = None
    if config.tier.enabled:
        tiers = tier_connector(
            config.tier, keeper_socket=_LATER, model_name=_LATER, weights_revision=_LATER, has_tenants=tenants
        )
    transfer = kv_transfer_config(engine, EngineId(_LATER), producer=role == "prefill", weights=_LATER, tiers=tiers)
    arguments = engine_arguments(
        config.model.path,
        config.model,
        engine,
        kv_transfer=transfer,
        events_endpoint=_LATER,
        replay_endpoint=_LATER,
        has_tenants=tenants,
        adapters=config.adapters,
        hf_overrides=config.model.hf_overrides.values(_LATER),
        keys=keys,
    )
    # As the operator wrote them: vLLM's parser may have made objects of them.
    arguments |= engine.args
    if role == "prefill" and draft_model(engine.args):
        arguments[SPECULATION] = drafts_of_prefill(arguments[SPECULATION])
    model = arguments.pop("model")
    lines = [f"{name}={shlex.quote(value)}" for name, value in engine.env.items()]
    lines += [
        f"vllm serve {shlex.quote(model)}",
        *(shlex.join(words(name, value)) for name, value in arguments.items()),
    ]
    return " \\\n  ".join(lines)
