"""Rules across sections: each yields faults, with their keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from pydantic import ValidationError

from kvferry.arguments import vllm_arguments
from kvferry.arguments.argument_values import why_in_conflict
from kvferry.config.cluster import ClusterConfig, Keys
from kvferry.config.engine import EngineConfig, check_arguments, check_removed
from kvferry.config.section import explain, key_of
from kvferry.config.workers import DEFAULT_POOL, MAX_POOLS, ROLES
from kvferry.errors import ConfigError
from kvferry.util import satellites

Rule = Callable[[ClusterConfig], Iterator[str]]
ModelRule = Callable[[ClusterConfig, Keys], Iterator[str]]


def check(config: ClusterConfig) -> None:
    """Raises ConfigError."""
    # The first fault: later rules rely on earlier ones.
    for fault in itertools.chain.from_iterable(rule(config) for rule in RULES):
        raise ConfigError(fault)


def prefix_lies_in_no_other(config: ClusterConfig) -> Iterator[str]:
    # A user that may read one cluster's keys must not read another's. Two prefixes of this form are equal or apart:
    # `clusters` is in each once, and only the name follows it.
    prefix = config.membership.prefix.rstrip("/")
    root = prefix.removesuffix(f"/clusters/{config.name}")
    if root == prefix or "clusters" in root.split("/"):
        yield (
            f"membership.prefix: {prefix!r} must end with /clusters/{config.name}, the cluster's name, and have no "
            "other part `clusters`: then no cluster's keys lie among those of another"
        )


def models_have_names(config: ClusterConfig) -> Iterator[str]:
    if len(config.models) + len(config.pools) > MAX_POOLS:
        yield f"models: {len(config.models)} and {len(config.pools)} pools; {MAX_POOLS} in all is the limit"
    places: dict[str, str] = {name: f"pools.{name}" for name in config.pools}
    for place, entry in enumerate(config.models):
        if (other := places.setdefault(entry.name, f"models[{place}]")) != f"models[{place}]":
            yield f"models[{place}].name: {entry.name!r} is the name of {other}"


def names_lead_to_one_model(config: ClusterConfig) -> Iterator[str]:
    owner_of = {config.served_name: "the default pool"} if config.serves_default else {}
    for key, name in config.further_names().items():
        if name and (owner := owner_of.setdefault(name, key)) != key:
            words = f"pool {owner.split('.')[1]!r}" if owner.startswith("pools.") else owner
            yield f"{key}: {name!r} is the name of {words}"


def volumes_have_pools(config: ClusterConfig) -> Iterator[str]:
    pools = {"", *config.pools, *(entry.name for entry in config.models)}
    for place, volume in enumerate(config.tier.volumes):
        if volume.pool not in pools:
            yield f"tier.volumes[{place}].pool: there is no pool {volume.pool[:80]!r}"


def canaries_are_other_models(config: ClusterConfig) -> Iterator[str]:
    known = {*(entry.name for entry in config.models), *([DEFAULT_POOL] if config.serves_default else [])}
    for key, own, canary in (
        ("model", DEFAULT_POOL, config.model.canary),
        *((f"models[{place}].model", each.name, each.model.canary) for place, each in enumerate(config.models)),
    ):
        for name in canary:
            if name == own or name not in known:
                others = ", ".join(sorted(known - {own})) or "none"
                why = "is the model itself" if name == own else "is no model of this cluster"
                yield f"{key}.canary: {name[:80]!r} {why}; others that can take a share: {others}"


def simulated_engines_have_no_templates(config: ClusterConfig) -> Iterator[str]:
    # A gateway alone would find this out, while `kvferry up` waits for it.
    if config.engine.kind == "sim":
        entries = ((f"models[{place}].model", each.model) for place, each in enumerate(config.models))
        for key, model in (("model", config.model), *entries):
            if model.chat_template is not None:
                yield f"{key}.chat_template: simulated engines (engine.kind: sim) have no templates"
    elif config.sim:
        yield "sim: settings of simulated engines, and engine.kind is vllm"


def simulated_engines_take_their_settings(config: ClusterConfig) -> Iterator[str]:
    if config.engine.kind == "sim":
        try:
            satellites.simulator().max_model_len(config.sim)
        except ValueError as error:
            yield str(error)


def adapters_are_of_the_default_model(config: ClusterConfig) -> Iterator[str]:
    served = config.adapters.served
    if not served:
        return
    if not config.serves_default:
        yield (
            "adapters.served: only the default model can have adapters, and this cluster has none: all its models "
            "are entries of `models`. Describe the base model in `model`, and give `prefill` and `decode` replicas"
        )
    names = {config.served_name, *config.further_names().values(), *(entry.name for entry in config.models)}
    if clash := sorted(names & served.keys()):
        yield f"adapters.served.{clash[0]}: {clash[0]!r} is the name of a model"
    # An adapter may be asked for as MODEL:NAME, by each name of the default model.
    of_default = {config.served_name, *config.model.aliases, *(pool.served_name for pool in config.pools.values())}
    for name in sorted(names):
        model, colon, adapter = name.rpartition(":")
        if colon and adapter in served and model in of_default:
            yield f"adapters.served.{adapter}: {name!r}, as it may be asked for, is the name of a model"


def engines_can_have_adapters(config: ClusterConfig) -> Iterator[str]:
    if not config.adapters.served:
        return
    engines = [config.engine_of(role, pool) for pool in ("", *config.pools) for role in ROLES]
    ranks = max(engine.tensor_parallel_size for engine in engines)
    if config.engine.kind == "vllm" and ranks > 1:
        yield (f"adapters.served: adapters are untested with engine.tensor_parallel_size {ranks}, only 1 is tested")
    if any(vllm_arguments.speculates(engine.args) for engine in engines):
        yield (
            f"adapters.served: adapters are untested beside {vllm_arguments.SPECULATION} "
            "(engine.args, decode.engine.args): remove one of the two"
        )


def hangs_are_noticed_first(config: ClusterConfig) -> Iterator[str]:
    inter_token_s, hang_s = config.gateway.inter_token_timeout_s, config.worker.hang_timeout_s
    if config.engine.kind == "vllm" and inter_token_s <= hang_s:
        yield (
            f"gateway.inter_token_timeout_s ({inter_token_s:g}) must be above worker.hang_timeout_s ({hang_s:g}), "
            "or answers end before another worker continues them"
        )


def arguments_of_roles_are_taken(config: ClusterConfig, keys: Keys) -> Iterator[str]:
    for pool, role in itertools.product(("", *config.pools), ROLES):
        own = config.role_of(role, pool).engine
        try:
            of_both = config.engine.args
            args = check_removed(own.args, of_both, role=role)
            check_arguments(args, role=role, device=config.engine.device, of_both=of_both)
        except ValueError as error:
            yield f"{keys.of_role(role, pool)}.engine.args: {error}"
        engine = config.engine_of(role, pool)
        settings = {**dict(engine), "max_model_len": config.model.max_model_len}
        names = keys.of_engine(own, role, pool) | keys.of_arguments(engine.args, own, role, pool)
        names["max_model_len"] = keys.of("model.max_model_len")
        if reason := why_in_conflict(engine.args, settings, names):
            yield reason


def ranks_have_gpus(config: ClusterConfig, keys: Keys) -> Iterator[str]:
    if config.engine.kind != "vllm" or config.engine.device != "gpu":
        return
    for pool, role in itertools.product(("", *config.pools), ROLES):
        num_gpus, ranks = config.role_of(role, pool).num_gpus, config.engine_of(role, pool).tensor_parallel_size
        # 0: Ray gives none, or by `resources`, or there is no Ray.
        if 0 < num_gpus < ranks and ranks > 1:
            yield (
                f"{keys.of_role(role, pool)}.num_gpus: {num_gpus:g} are too few for tensor_parallel_size {ranks}: "
                "each rank has a GPU of its own"
            )


def ranks_of_roles_fit(config: ClusterConfig, keys: Keys) -> Iterator[str]:
    for pool in ("", *config.pools):
        prefill, decode = (config.engine_of(role, pool).tensor_parallel_size for role in ROLES)
        if prefill == decode:
            continue
        both = f"{keys.of_role('prefill', pool)}.engine.tensor_parallel_size ({prefill}) and decode's ({decode})"
        if max(prefill, decode) % min(prefill, decode):
            yield f"{both}: one must be a multiple of the other"
        if config.volumes_of(pool) is not None:
            yield (
                f"{both} must be equal with tier.volumes: a chunk has the pages of all ranks of one size, and the "
                "other role's engines could not read it"
            )


def pages_have_the_models_dtype(config: ClusterConfig, keys: Keys) -> Iterator[str]:
    dtype, of_pages = config.model_dtype, config.engine.kv_cache_dtype
    if config.engine.kind != "vllm" or dtype in ("auto", of_pages) or of_pages not in ("float16", "bfloat16"):
        return
    of_model = keys.of("model.dtype")
    on_cpu = f" ({of_model}: auto, on a CPU)" if config.model.dtype == "auto" else ""
    yield (
        f"{keys.of('engine.kv_cache_dtype')}: allowed are auto, and {of_pages} with {of_model}: {of_pages}. The model "
        f"is computed in {dtype}{on_cpu}, and pages of another type gave garbage on a CPU and are untested on GPUs, "
        f"so not {of_pages!r}"
    )


def overrides_stand_once(config: ClusterConfig, keys: Keys) -> Iterator[str]:
    if config.model.hf_overrides.context:
        overrides = keys.of("model.hf_overrides")
        if "hf_overrides" in config.engine.args:
            yield f"{overrides}, {keys.of('engine.args.hf_overrides')}: vLLM takes one of the two"
        if config.engine.quality_report is not None:
            yield f"{keys.of('engine.quality_report')}: with {overrides} nothing was measured"


def pages_of_tiers_are_plain(config: ClusterConfig, keys: Keys) -> Iterator[str]:
    for name in config.engine.args if config.tier.enabled else ():
        if reason := vllm_arguments.REFUSED_WITH_TIERS.get(name):
            yield f"{keys.of(f'engine.args.{name}')}: refused with tier.enabled: {reason}"


# They get `of_model`, the configuration of the workers.
RULES_OF_A_MODEL: tuple[ModelRule, ...] = (
    arguments_of_roles_are_taken,
    ranks_have_gpus,
    ranks_of_roles_fit,
    pages_have_the_models_dtype,
    overrides_stand_once,
    pages_of_tiers_are_plain,
)


def default_model_fits(config: ClusterConfig) -> Iterator[str]:
    for rule in RULES_OF_A_MODEL:
        yield from rule(config, Keys())


def models_of_their_own_fit(config: ClusterConfig) -> Iterator[str]:
    for place, entry in enumerate(config.models):
        keys = Keys(entry, f"models[{place}]")
        args = entry.engine.get("args")
        try:
            check_removed(args if isinstance(args, dict) else {}, config.engine.args)
        except ValueError as error:
            yield f"{keys.of('engine.args')}: {error}"
            return
        try:
            own = config.of_model(entry.name)
        except ValidationError as error:
            yield "\n".join(
                keys.named(explain(fault, keys.of(key_of(("engine", *fault["loc"]))), EngineConfig))
                for fault in error.errors()
            )
            return
        for rule in RULES_OF_A_MODEL:
            yield from map(keys.named, rule(own, keys))


def models_share_volumes_of_one_layout(config: ClusterConfig) -> Iterator[str]:
    if config.engine.kind != "vllm" or config.tier.blocks_per_chunk is not None:
        return
    users = [entry.name for entry in config.models if config.of_model(entry.name).volumes_of(entry.name) == ""]
    users += [DEFAULT_POOL] if config.serves_default and config.volumes_of("") == "" else []
    if len(users) > 1:
        yield (
            f"tier.blocks_per_chunk: must be set where models share volumes ({', '.join(sorted(users))}): by default "
            "each would have its own, and gateways know one per volume. Or give them volumes of their own "
            "(tier.volumes[N].pool)"
        )


RULES: tuple[Rule, ...] = (
    prefix_lies_in_no_other,
    models_have_names,
    names_lead_to_one_model,
    volumes_have_pools,
    canaries_are_other_models,
    simulated_engines_have_no_templates,
    adapters_are_of_the_default_model,
    engines_can_have_adapters,
    simulated_engines_take_their_settings,
    default_model_fits,
    hangs_are_noticed_first,
    models_of_their_own_fit,
    models_share_volumes_of_one_layout,
)
