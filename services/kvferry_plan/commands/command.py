"""The command `kvferry plan`. Exit codes: 0 planned, 1 nothing meets the demand, 2 bad input."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvferry import model_folder
from kvferry.cli import reported
from kvferry.engine.vllm.model_kinds import ARCHITECTURES
from kvferry.errors import ConfigError
from kvferry.util import plain_yaml
from kvferry_plan import model_catalogue
from kvferry_plan.commands import inputs, report
from kvferry_plan.planner import (
    answer,
    assumptions,
    calibration,
    emit,
    gpu_catalogue,
    kv_dtypes,
    models,
    plan,
    profiles,
    published,
    published_functions,
    workload,
)
from kvferry_plan.planner.layouts import Layout, refusal
from kvferry_plan.planner.plan import Plan
from kvferry_plan.planner.profiles import Profile
from kvferry_plan.planner.question import MAX_GPUS, Question, priced
from kvferry_plan.planner.roofline import Engine
from kvferry_plan.planner.sizing import Candidate

_CONTEXT_TOKENS = 8192
_TTFT_S = 2.0
_PROMPT_TOKENS_S = 1000.0  # where no objective is given, longer prompts have a TTFT of a second for each of these
_TPOT_S = 0.05
_EMITTED = ("values.yaml", "serve.yaml", "vllm")
_LISTS = ("gpus", "profiles", "rules", "settings")


@click.command(name="plan")
@click.argument("model", required=False)
@click.option("--profile", help="Start from a workload: chat, code, rag, batch, agents, multi-tenant.")
@click.option("--context", "context_tokens", type=int, help="Longest request, prompt and answer.  [default: 8192]")
@click.option("--users", type=float, help="Requests under way at once.")
@click.option("--rate", "rate_per_s", type=float, help="Requests per second, instead of --users.")
@click.option("--prompt", help="Tokens, MEAN or MEAN:P99.  [default: what --context leaves]")
@click.option("--output", help="Tokens, MEAN or MEAN:P99.  [default: 512 or an eighth of --context]")
@click.option("--trace", type=click.Path(path_type=Path), help="JSON lines with input_length and output_length.")
@click.option("--scenario", type=click.Path(path_type=Path), help="A scenario file of kvferry-loadtest.")
@click.option("--prefix-share", type=float, help="Share of prompts that all requests have in common.")
@click.option("--restored-share", type=float, default=0.0, help="Share of prompts that comes back from a lower tier.")
@click.option("--think", "think_s", type=float, default=0.0, help="Seconds between a user's requests.")
@click.option(
    "--ttft",
    "ttft_s",
    type=float,
    help="Objective in seconds, for 99 % of requests.  [default: the larger of 2 and prompt / 1000]",
)
@click.option("--tpot", "tpot_s", type=float, help="Objective in seconds, mean.  [default: 0.05]")
@click.option("--gpu", "gpu_names", multiple=True, help="Only these GPUs; may be repeated.  [default: all but CPUs]")
@click.option("--budget", "budget", type=float, help="US dollars an hour, at most.")
@click.option("--max-gpus", type=int, help="GPUs, at most.")
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="[NAME=]USD",
    help="For one GPU and hour, of your own: of all, or of one.",
)
@click.option(
    "--catalogue", type=click.Path(path_type=Path), help="A YAML file of GPUs that wins over the shipped one."
)
@click.option("--kv-cache-dtype", help="As vLLM's: auto, fp8, nvfp4, int8_per_token_head, ...  [default: auto]")
@click.option("--weights", help="Type of the weights, where it is not the checkpoint's: fp8, bfloat16, nvfp4, ...")
@click.option("--parameters", type=float, help="Of a model whose number of parameters is not known.")
@click.option("--active-parameters", type=float, help="Of one token, in a mixture of experts.")
@click.option("--tp", "tensor_parallel", type=int, help="Tensor-parallel size.  [default: all legal ones]")
@click.option("--pp", "pipeline_parallel", type=int, help="Pipeline-parallel size.  [default: 1, 2, 3, 4, 8]")
@click.option("--mode", type=click.Choice(["any", "disaggregated", "aggregated"]), help="Prefill apart, or not.")
@click.option("--gpu-memory-utilization", type=float, default=0.9, show_default=True)
@click.option("--block-size", type=int, help="Tokens of a KV page.  [default: 16, 32 on CPUs]")
@click.option("--max-num-seqs", type=int, default=1024, show_default=True)
@click.option("--max-num-batched-tokens", type=int, help="Tokens of a step.  [default: 8192]")
@click.option("--kv-cache-gib", type=int, help="GiB for KV pages of one engine, as engine.kv_cache_gib on CPUs.")
@click.option("--headroom", type=float, help="Share of the KV pages that stays free.  [default: 0.15]")
@click.option("--cpu-tier", "cpu_tier_gib", type=int, help="GiB of CPU memory for KV, of one node.")
@click.option("--volume-tier", "volume_tier_gib", type=int, help="GiB of NVMe for KV, of one node.")
@click.option(
    "--assume", "assumed", multiple=True, metavar="NAME=VALUE", help="Set an assumption; --explain lists all."
)
@click.option("--calibrate", metavar="URL", help="Measure a running cluster for a minute, and use its efficiencies.")
@click.option("--explain", "explained", is_flag=True, help="Each number with its formula.")
@click.option("--bars", is_flag=True, help="Memory and rooflines as bars in the terminal.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="The same as a PNG file.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--emit", "emitted", type=click.Choice(_EMITTED), help="Print what helm, serve or vllm takes, only.")
@click.option("--path", help="With --emit: the checkpoint to serve, a hub id or a folder, where it is not MODEL's.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="With --emit serve.yaml: any setting.")
@click.option("--published", "show_published", is_flag=True, help="List published figures that arithmetic contradicts.")
@click.option("--list", "listed", type=click.Choice(_LISTS), help="Show the planner's data.")
@reported
def plan_command(model: str | None, show_published: bool, listed: str | None, **options: Any) -> None:
    """Plan a deployment of MODEL: how many GPUs of which kind, split how, and what binds.

    MODEL is a catalogue name (llama-3.1-70b), a hub id, or a folder with a config.json.
    """
    if show_published:
        _show_published(as_json=options["as_json"])
    elif listed is not None:
        _show_list(listed, options["catalogue"])
    elif model is None:
        raise ConfigError(
            "MODEL is missing: a catalogue name (llama-3.1-70b), a hub id, or a folder with a config.json"
        )
    else:
        _show_plan(model, options)


def _check_shown(options: dict[str, Any]) -> None:
    # An option that would count for nothing is a mistake.
    if options["settings"] and options["emitted"] != "serve.yaml":
        raise ConfigError("--set counts with --emit serve.yaml alone")
    beside = {"--plot": "plot", "--bars": "bars", "--explain": "explained", "--json": "as_json"}
    if options["emitted"] and (given := [option for option, name in beside.items() if options[name]]):
        raise ConfigError(f"--emit prints one thing only; leave out {', '.join(given)}")


def _show_plan(name: str, options: dict[str, Any]) -> None:
    _check_shown(options)
    question = _question(name, options)
    if options["calibrate"] is not None:
        question = _calibrated(question, options["calibrate"])
    found = plan.make(question)
    if options["emitted"]:
        click.echo(_emitted(options["emitted"], found, _checkpoint(name, options["path"], question), options), nl=False)
        return
    if options["plot"] is not None:
        from kvferry_plan.commands import chart

        chart.draw(found, options["plot"])
    if options["as_json"]:
        click.echo(json.dumps(answer.as_json(found), indent=2))
        return
    to = report.console()
    report.print_plan(to, found)
    if options["bars"]:
        report.print_bars(to, found)
    if options["explained"]:
        report.print_explanation(to, found)
    wanted = "auto"
    if options["profile"] and options["kv_cache_dtype"] is None:
        wanted = profiles.find(options["profile"]).kv_cache_dtype(question.demand.context_tokens)
    if wanted != "auto":
        to.print(
            f"[bold]profile[/]    wants KV pages in {wanted} at this context: --kv-cache-dtype {wanted} plans them, "
            "for vLLM alone where kvferry does not serve them"
        )


def _calibrated(question: Question, url: str) -> Question:
    # Measure the deployment at `url`, which has to be of this model, on the one GPU that --gpu names.
    from kvferry_plan.commands.measuring import measure

    if len(question.gpus) != 1:
        raise ConfigError("--calibrate: name the GPU that serves there with --gpu")
    ((_, gpu),) = question.gpus.items()
    layout = Layout(1 if question.tensor_parallel_size is None else question.tensor_parallel_size)
    if why := refusal(layout, question.model, gpu):
        raise ConfigError(f"--tp {layout.tensor_parallel_size}: {why}")
    engine = Engine(question.model, gpu, layout, question.kv_dtype, question.assumptions)
    measured = measure(url, longest_tokens=question.demand.context_tokens)
    found = calibration.calibrate(engine, measured.prefills, measured.decodes)
    click.echo(
        f"kvferry: calibrated at {url}: the fit is within {found.prefill_error:.0%} of prefill and "
        f"{found.decode_error:.0%} of decode",
        err=True,
    )
    return question.with_changes(assumptions=found.assumptions, is_calibrated=True)


def _question(name: str, options: dict[str, Any]) -> Question:
    profile = None if options["profile"] is None else profiles.find(options["profile"])
    load = _load(options)
    _check_printable("MODEL", name)
    geometry = model_catalogue.geometry_of(name)
    for each in (geometry.name, geometry.model_type, geometry.architecture, geometry.quantization):
        _check_printable(f"{name}: config.json", each)
    parameters = _count(options["parameters"], "--parameters")
    active = _count(options["active_parameters"], "--active-parameters")
    if parameters is None and geometry.num_parameters is None:
        counted = inputs.count(model_folder.read_config(name), geometry)
        if counted is not None:
            total, used = counted
            geometry = dataclasses.replace(geometry, num_parameters=total, num_active_parameters=used)
    gpus = _gpus(options)
    only_cpus = all(gpu.is_cpu for gpu in gpus.values())
    if only_cpus:
        # As kvferry serves there: model.dtype `auto` is float32 on CPUs.
        geometry = dataclasses.replace(geometry, dtype="float32")
    model = models.planned(geometry, options["weights"], parameters, active)
    context = options["context_tokens"]
    if context is None:
        context = profile.context_tokens if profile else min(_CONTEXT_TOKENS, geometry.context_length)
    given = _assumed(options["assumed"])
    if options["headroom"] is not None:
        if not 0 <= options["headroom"] <= 0.95:
            raise ConfigError(f"--headroom {options['headroom']:g}: expected 0 to 0.95")
        given["kv_limit"] = 1 - options["headroom"]
    assume = assumptions.with_values(given)
    return Question(
        model=model,
        demand=_demand(options, profile, load, context),
        gpus=gpus,
        kv_cache_dtype=_kv_cache_dtype(options),
        assumptions=assume,
        gpu_memory_utilization=options["gpu_memory_utilization"],
        block_size=_given(options, "block_size", 32 if only_cpus else 16),
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=_given(
            options, "max_num_batched_tokens", profile.max_num_batched_tokens if profile else 8192
        ),
        tensor_parallel_size=options["tensor_parallel"],
        pipeline_parallel_size=options["pipeline_parallel"],
        mode=_given(options, "mode", profile.mode if profile else "any"),
        budget_usd_per_hour=options["budget"],
        max_gpus=_given(options, "max_gpus", MAX_GPUS),
        cpu_tier_bytes=_tier(options["cpu_tier_gib"], profile.cpu_tier_gib if profile else 0),
        volume_tier_bytes=_tier(options["volume_tier_gib"], profile.volume_tier_gib if profile else 0),
        kv_cache_bytes=_kv_cache_bytes(options["kv_cache_gib"]),
        tier_architectures=ARCHITECTURES,
    )


def _demand(
    options: dict[str, Any], profile: Profile | None, load: inputs.Load | None, context: int
) -> workload.Demand:
    prompt = workload.parse_lengths(options["prompt"], "--prompt") if options["prompt"] is not None else None
    output = workload.parse_lengths(options["output"], "--output") if options["output"] is not None else None
    if load is not None:
        prompt, output = prompt or load.prompt, output or load.output
    if profile is not None and context == profile.context_tokens:
        prompt = prompt or workload.parse_lengths(profile.prompt, "--prompt")
        output = output or workload.parse_lengths(profile.output, "--output")
    users, rate = options["users"], options["rate_per_s"]
    if users is None and rate is None:
        rate = load.rate_per_s if load else None
        users = 1.0 if rate is None else None

    longest = prompt.p99 if prompt else float(context)
    # What an option, a load or a profile says of the objectives and of shared prompts, in this order.
    said = [options, *(dataclasses.asdict(each) for each in (load, profile) if each is not None)]

    def first(name: str, default: float) -> float:
        return next((float(each[name]) for each in said if each.get(name) is not None), default)

    return workload.demand(
        context_tokens=context,
        prompt=prompt,
        output=output,
        users=users,
        rate_per_s=rate,
        ttft_s=first("ttft_s", max(_TTFT_S, longest / _PROMPT_TOKENS_S)),
        ttft_is_default=not any(each.get("ttft_s") is not None for each in said),
        tpot_s=first("tpot_s", _TPOT_S),
        think_s=options["think_s"],
        prefix_share=first("prefix_share", 0.0),
        restored_share=options["restored_share"],
    )


def _kv_cache_dtype(options: dict[str, Any]) -> str:
    name = str(_given(options, "kv_cache_dtype", "auto"))
    if name not in kv_dtypes.KNOWN:
        raise ConfigError(
            f"--kv-cache-dtype {name[:40]!r}: vLLM 0.32 has no KV cache dtype of this name; it has "
            f"{', '.join(kv_dtypes.KNOWN)}"
        )
    return name


def _load(options: dict[str, Any]) -> inputs.Load | None:
    if options["trace"] is not None and options["scenario"] is not None:
        raise ConfigError("give either --trace or --scenario")
    if options["trace"] is not None:
        return inputs.read_trace(options["trace"])
    return None if options["scenario"] is None else inputs.read_scenario(options["scenario"])


def _gpus(options: dict[str, Any]) -> dict[str, gpu_catalogue.Gpu]:
    known = gpu_catalogue.shipped() if options["catalogue"] is None else inputs.read_catalogue(options["catalogue"])
    # As names of models, in any case of letters.
    named = [name.lower() for name in options["gpu_names"]]
    names: Sequence[str] = named or [name for name, gpu in known.items() if not gpu.is_cpu]
    chosen = {name: gpu_catalogue.find(known, name) for name in names}
    return dict(priced(chosen, _prices(options["prices"], chosen)))


def _prices(given: Sequence[str], gpus: Mapping[str, gpu_catalogue.Gpu]) -> dict[str, float]:
    # Return the price of each GPU that has one: a price with a name wins over that of all.
    of_all: dict[str, float] = {}
    of_one: dict[str, float] = {}
    for each in given:
        name, equals, text = each.rpartition("=")
        name = name.lower()
        try:
            usd = float(text)
        except ValueError:
            usd = math.nan
        if not 0 < usd <= 1e6:
            raise ConfigError(
                f"--price {each[:80]}: expected US dollars for one GPU and hour, above 0, as 3.1 or h200=3.1"
            )
        if equals and name not in gpus:
            raise ConfigError(f"--price {each[:80]!r}: no such GPU is planned; there are {', '.join(sorted(gpus))}")
        if name in of_one or (not equals and of_all):
            raise ConfigError(f"--price {each[:80]}: a second price for {name or 'all GPUs'}")
        if equals:
            of_one[name] = usd
        else:
            of_all = dict.fromkeys(gpus, usd)
    return of_all | of_one


def _assumed(given: Sequence[str]) -> dict[str, float]:
    values = {}
    for each in given:
        name, equals, text = each.partition("=")
        try:
            values[name] = float(text)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--assume {each[:80]!r}: expected NAME=NUMBER")
    return values


def _count(value: float | None, option: str) -> int | None:
    if value is None:
        return None
    if not 1e3 <= value <= 1e15:
        raise ConfigError(f"{option} {value:g}: expected 1e3 to 1e15")
    return int(value)


def _check_printable(what: str, text: str) -> None:
    # These texts stand in commands and manifests.
    if not text.isprintable():
        raise ConfigError(f"{what}: {text[:80]!a}: control characters are not allowed")


def _given(options: dict[str, Any], name: str, default: Any) -> Any:
    return default if options[name] is None else options[name]


def _kv_cache_bytes(gib: int | None) -> int | None:
    if gib is not None and not 1 <= gib <= 1 << 20:
        raise ConfigError(f"--kv-cache-gib {gib}: expected 1 to {1 << 20}")
    return None if gib is None else profiles.tier_bytes(gib)


def _tier(given: int | None, of_profile: int) -> int:
    gib = of_profile if given is None else given
    if not 0 <= gib <= 1 << 20:
        raise ConfigError(f"a tier of {gib} GiB: expected 0 to {1 << 20}")
    return profiles.tier_bytes(gib)


def _checkpoint(name: str, path: str | None, question: Question) -> str:
    # Return the folder or hub id whose weights are the planned ones. Raises ConfigError where it has others.
    model = question.model
    if path is None:
        entry = model_catalogue.find(name)
        path = name if entry is None else entry.hub_id
        if model.needs_other_checkpoint:
            raise ConfigError(
                f"--emit: the plan has weights in {model.weights}, and {path} has {model.checkpoint_weights}: name a "
                f"checkpoint in {model.weights} with --path, a hub id or a folder"
            )
        return path
    _check_printable("--path", path)
    known = model_catalogue.find(path)
    if model_folder.is_folder(path) or known is not None:
        geometry = model_catalogue.geometry_of(path)
        there = dataclasses.replace(model, geometry=geometry)
        if there.needs_other_checkpoint:
            raise ConfigError(
                f"--path {path}: its weights are {there.checkpoint_weights}; the plan has them in {model.weights}"
            )
        is_same = geometry.groups == model.geometry.groups and geometry.dtype == model.geometry.dtype
        if not is_same or models.native_kv_dtype(there, question.kv_cache_dtype) != question.kv_dtype:
            raise ConfigError(f"--path {path}: its KV pages are not those of {model.geometry.name}")
    return path if known is None else known.hub_id


def _emitted(form: str, found: Plan, path: str, options: dict[str, Any]) -> str:
    served_name = path.rstrip("/").rpartition("/")[2]
    question = found.question
    if form == "vllm":
        return emit.vllm_commands(found.best, question, model_path=path)
    candidate = _servable(found)
    if model_folder.is_folder(path):
        path = str(Path(path).expanduser().absolute())
    title = [f"{candidate.num_gpus} x {candidate.gpu.title}, {candidate.layout.text()}, by `kvferry plan`."]
    if form == "values.yaml":
        content: Any = emit.values(candidate, question, model_path=path, served_name=served_name)
        title += emit.notes(candidate, question, model_path=path)
    else:
        settings = options["settings"]
        content = emit.serve(candidate, question, model_path=path, served_name=served_name, settings=settings)
    return "".join(f"# {line}\n" for line in title) + plain_yaml.dump(content)


def _servable(found: Plan) -> Candidate:
    # Return the best candidate that kvferry serves. Raises ConfigError with the reasons against the best one.
    for candidate in found.candidates:
        if not emit.obstacles(candidate, found.question):
            return candidate
    reasons = "; ".join(emit.obstacles(found.best, found.question))
    raise ConfigError(f"--emit: kvferry does not serve this plan: {reasons}. --emit vllm prints what vLLM takes")


def _show_published(*, as_json: bool) -> None:
    collection = published.load()

    def geometry_of(name: str) -> Any:
        entry = model_catalogue.find(name)
        if entry is None:
            raise ConfigError(f"the model catalogue has no {name!r}, which a published figure names")
        return entry.geometry()

    functions = published_functions.functions(geometry_of)
    judgements = [published.judge(figure, functions) for figure in collection.figures]
    if as_json:
        click.echo(json.dumps([published.as_json(each) for each in judgements], indent=2))
    else:
        report.print_published(report.console(), judgements, collection)


def _show_list(listed: str, catalogue: Path | None) -> None:
    to = report.console()
    if listed == "gpus":
        gpus = gpu_catalogue.shipped() if catalogue is None else inputs.read_catalogue(catalogue)
        report.print_gpus(to, gpus.items())
    elif listed == "profiles":
        report.print_profiles(to)
    elif listed == "rules":
        report.print_rules(to)
    else:
        report.print_settings(to)
