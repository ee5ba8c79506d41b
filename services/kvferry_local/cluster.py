"""`up` and `down` of a cluster on this machine.

Processes are found by the run folder's marks, so one procedure ends any cluster, also after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil

from kvferry import model_folder
from kvferry.arguments.vllm_arguments import SPECULATION, draft_model
from kvferry.config import ClusterConfig, GatewayConfig, parse
from kvferry.engine.quality_report import check_quality_report
from kvferry.engine.vllm.rendering.chat_template import read_chat_template
from kvferry.engine.vllm.start.weights import weights_revision
from kvferry.errors import ConfigError, Interrupted, LocalError
from kvferry.pages.geometry.config_json import from_config
from kvferry.util import plain_yaml, satellites, shared_memory
from kvferry.util.addresses import free_port, node_address
from kvferry_local.authority import make_certificates
from kvferry_local.child import Child, Pace, StartFailed, tail
from kvferry_local.etcd_process import Etcd, start_etcd
from kvferry_local.first_answer import FirstAnswer, QuestionRefused, ask
from kvferry_local.gateway_access import context_of, url_of, why_not_to_ask
from kvferry_local.log_excerpts import newest_cause, newest_fault, newest_line
from kvferry_local.processes import ProcessIdentity, belonging, end_all
from kvferry_local.progress import NoProgress, Progress
from kvferry_local.ray_process import Ray, engine_environment, is_of_ray, ray_environment, start_ray
from kvferry_local.run_folder import ClusterBusy, ClusterRecord, RunFolder, run_folder

_POLL_S = 0.5
_PORT_PATIENCE_S = 2.0
_SHOW_LOG_AFTER_S = 20.0
_RECORD_INTERVAL_S = 5.0
_HAND_OVER_TIMEOUT_S = 90.0
_DEPLOY_MARGIN_S = 60.0
_DEPLOY_END_S = 5.0


class AlreadyRunning(LocalError):
    def __init__(self, record: ClusterRecord, changed_key: str = "") -> None:
        kept = f" and keeps its value of {changed_key}, which does not change while it runs" if changed_key else ""
        super().__init__(
            f"the cluster {record.name!r} already runs at {record.url}{kept}; "
            "`kvferry status` shows it, `kvferry down` (or `make down`) ends it"
        )
        self.url = record.url

    @classmethod
    def beside(cls, record: ClusterRecord, asked: ClusterConfig) -> AlreadyRunning:
        """Return the error that names the first setting which is asked for and not what the cluster runs with."""
        wanted = asked.model_dump(mode="json")
        return cls(record, _first_difference(record.asked, wanted) if record.asked else "")


@dataclass(frozen=True, slots=True)
class RunningCluster:
    folder: RunFolder
    record: ClusterRecord
    config: ClusterConfig
    first_answer: FirstAnswer | None

    @property
    def url(self) -> str:
        return self.record.url


@dataclass(frozen=True, slots=True)
class Cleaned:
    num_processes: int
    shared_memory_names: tuple[str, ...]
    had_state: bool  # there was a run folder of a cluster

    @property
    def anything(self) -> bool:
        return bool(self.num_processes or self.shared_memory_names or self.had_state)


def up(
    config: ClusterConfig,
    progress: Progress | None = None,
    *,
    with_first_answer: bool = True,
    timeout_s: float | None = None,
) -> RunningCluster:
    """Start a cluster and leave it running. Where it runs with other models, change these.

    Raises AlreadyRunning, ClusterBusy, ConfigError, StartFailed or Interrupted; then only logs remain. `timeout_s`
    bounds readiness, by default the engine's.
    """
    shown = progress if progress is not None else NoProgress()
    folder = run_folder(config.name)
    with folder.locked("up"):
        running = folder.record()
        if running is not None and is_alive(running):
            if (changed := with_other_models(running, config)) is None:
                raise AlreadyRunning.beside(running, config)
            return _change_models(folder, running, config, changed, shown, timeout_s or config.engine.start_timeout_s)
        if (leftover := _clean(folder, keep_logs=False)).anything:
            shown.say(f"cleaned up after a cluster that had died ({leftover.num_processes} processes)")
        try:
            return _start(folder, config, shown, with_first_answer, timeout_s or config.engine.start_timeout_s)
        except (Interrupted, KeyboardInterrupt, ConfigError):
            with _deferred_interrupts(Pace()), shown.step("ending what was started"):
                _clean(folder, keep_logs=False)
                folder.remove_if_empty()
            raise
        except BaseException:
            with _deferred_interrupts(Pace()), shown.step("ending what was started"):
                _clean(folder, keep_logs=True)
            shown.say(f"logs: {folder.logs}")
            raise


def down(folder: RunFolder, progress: Progress | None = None) -> Cleaned:
    """End a cluster in any state, interrupting a start in progress. Idempotent.

    Raises ClusterBusy while another `down` runs, ProcessesRemain if a process cannot be killed.
    """
    shown = progress if progress is not None else NoProgress()
    if not folder.path.exists():
        return Cleaned(0, (), had_state=False)
    with _take_over(folder, shown):
        try:
            with _deferred_interrupts(Pace()), shown.step("ending the cluster"):
                return _clean(folder, keep_logs=False)
        finally:
            folder.remove_if_empty()


def is_alive(record: ClusterRecord) -> bool:
    """Whether every process runs without which the cluster cannot recover."""
    return bool(record.pillars) and all(pillar.is_alive() for pillar in record.pillars)


def _start(
    folder: RunFolder, asked: ClusterConfig, progress: Progress, with_first_answer: bool, timeout_s: float
) -> RunningCluster:
    folder.prepare()
    folder.new_tokens()
    config = _with_own_places(asked, progress)
    tls = make_certificates(folder.tls)
    if not config.worker.tls.enabled:
        config = _changed(config, "worker", tls=tls.model_dump(mode="json"))
    pace = Pace(progress.tick)
    with _deferred_interrupts(pace):
        etcd = None
        if not config.membership.endpoints:
            with progress.step("etcd"):
                etcd = start_etcd(folder, tls, pace)
            files = tls.model_dump(mode="json", include={"ca_file", "cert_file", "key_file"})
            config = _changed(config, "membership", endpoints=[etcd.endpoint], **files)
        else:
            _require_reachable(config.membership.endpoints)
        with progress.step("Ray"):
            ray = start_ray(folder, config, pace)
        record = ClusterRecord(
            name=config.name,
            ready=False,
            started_unix_s=time.time(),
            url=url_of(config.gateway),
            etcd_endpoints=config.membership.endpoints,
            ray_address=ray.address,
            pillars=(*ray.pillars, *((etcd.child.identity,) if etcd is not None else ())),
            config=config.model_dump(mode="json"),
            asked=asked.model_dump(mode="json"),
        )
        folder.write_config(plain_yaml.dump(config.model_dump(mode="json")))
        folder.write_record(record)
        with progress.step(f"prefill, decode and gateway ({config.engine.kind} engine)"):
            # Its wait ends after the one below, which also takes a cluster that serves without all workers.
            deploy = _deploy(folder, config, ray.address, "--wait", str(timeout_s + _DEPLOY_MARGIN_S))
            parts = _Parts(etcd, ray, deploy)
            _wait_ready(folder, config.gateway, parts, progress, pace, timeout_s)
            parts.end_deploy(pace)
        first_answer = None
        if with_first_answer and (reason := why_not_to_ask(config.gateway)):
            progress.say(f"no first question: {reason}")
        elif with_first_answer:
            try:
                with progress.step("first answer"):
                    first_answer = _ask_in_steps(config, pace, timeout_s)
            except QuestionRefused as error:
                progress.say(f"no first answer, but the cluster is ready: {error}")
        record = replace(record, ready=True)
        folder.write_record(record)
        # After this point a signal finds a finished cluster, which is then the user's to end.
        pace.check()
    return RunningCluster(folder, record, config, first_answer)


def _deploy(folder: RunFolder, config: ClusterConfig, ray_address: str, *more: str) -> Child:
    return Child(
        "deploy",
        [
            *(sys.executable, "-m", "kvferry.app", "deploy"),
            *("--config", str(folder.config_file)),
            *("--model-folder", config.model.path),
            *("--ray-address", ray_address),
            *more,
        ],
        folder=folder,
        environ=ray_environment(folder) | engine_environment(config),
    )


def with_other_models(running: ClusterRecord, asked: ClusterConfig) -> ClusterConfig | None:
    """Return the running cluster's configuration with the models that are asked for; None if it has them.

    Raises ConfigError where other settings changed too.
    """
    before = running.asked
    wanted = asked.model_dump(mode="json")
    if not before or _models_in(before) == _models_in(wanted):
        return None
    if key := _first_difference(_without_models(before), _without_models(wanted)):
        raise ConfigError(
            f"{key}: the cluster {running.name!r} runs with another value, and only `models`, `model.aliases` and "
            "`model.canary` change while it runs; give this one as before, or end the cluster (`kvferry down`)",
            param=key,
        )
    return parse({**running.config, "models": wanted["models"], "model": {**running.config["model"], **_names(wanted)}})


def _first_difference(before: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    for key, section in wanted.items():
        old = before.get(key)
        if isinstance(section, dict) and isinstance(old, dict):
            if below := _first_difference(old, section):
                return f"{key}.{below}"
        elif section != old:
            return key
    return next((key for key in before if key not in wanted), "")


def _models_in(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return values.get("models", []), _names(values)


def _names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values["model"].get(key) for key in ("aliases", "canary")}


def _without_models(values: Mapping[str, Any]) -> dict[str, Any]:
    model = {key: value for key, value in values["model"].items() if key not in ("aliases", "canary")}
    return {**{key: section for key, section in values.items() if key != "models"}, "model": model}


def _change_models(
    folder: RunFolder,
    running: ClusterRecord,
    asked: ClusterConfig,
    changed: ClusterConfig,
    progress: Progress,
    timeout_s: float,
) -> RunningCluster:
    config = with_model_folders(changed, progress)
    pace = Pace(progress.tick)
    with _deferred_interrupts(pace), progress.step("models"):
        values = config.model_dump(mode="json")
        # First: what is deployed has to be what the next `up` compares with, also where it does not come up.
        record = replace(running, config=values, asked=asked.model_dump(mode="json"))
        folder.write_config(plain_yaml.dump(values))
        folder.write_record(record)
        deploy = _deploy(folder, config, running.ray_address, "--wait", str(timeout_s))
        parts = _Parts(None, Ray(running.ray_address, running.pillars), deploy)

        def deployed() -> bool:
            parts.check()
            progress.detail(newest_cause(deploy.log))
            return deploy.has_ended()

        if not pace.until(deployed, deadline=time.monotonic() + timeout_s, step_s=_POLL_S):
            raise StartFailed(f"the models are not deployed after {timeout_s:.0f} s\n{tail(deploy.log)}")
        _wait_ready(folder, config.gateway, parts, progress, pace, timeout_s)
    return RunningCluster(folder, record, config, None)


@dataclass(frozen=True, slots=True)
class _Parts:
    etcd: Etcd | None
    ray: Ray
    deploy: Child

    def check(self) -> None:
        if self.etcd is not None and self.etcd.child.has_ended():
            raise self.etcd.child.failure()
        if not all(pillar.is_alive() for pillar in self.ray.pillars):
            raise StartFailed("Ray died")
        if self.deploy.exit_code() not in (None, 0):
            if cause := newest_cause(self.deploy.log):
                raise StartFailed(cause)
            raise self.deploy.failure()

    def end_deploy(self, pace: Pace) -> None:
        """Wait for the deploying process, or end it where it still waits for workers."""
        if not pace.until(self.deploy.has_ended, deadline=time.monotonic() + _DEPLOY_END_S):
            self.deploy.identity.send(signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class _Readiness:
    ready: bool
    waiting_for: tuple[str, ...]


def _wait_ready(
    folder: RunFolder, gateway: GatewayConfig, parts: _Parts, progress: Progress, pace: Pace, timeout_s: float
) -> None:
    url, context = url_of(gateway), context_of(gateway)
    started_s = recorded_s = time.monotonic()
    seen = _Readiness(False, ("gateway",))

    def ready() -> bool:
        nonlocal seen, recorded_s
        parts.check()
        if time.monotonic() - recorded_s > _RECORD_INTERVAL_S:
            # A worker records its own once its engine is up; one that is killed before has only this.
            recorded_s = time.monotonic()
            _record_shared_memory(folder, belonging(folder.marks()))
        seen = _readiness(url, context)
        if seen.ready and not seen.waiting_for:
            return True
        detail = f"waiting for {', '.join(seen.waiting_for)}"
        if cause := newest_cause(parts.deploy.log):
            detail += f" | {cause}"
        elif time.monotonic() - started_s > _SHOW_LOG_AFTER_S and (line := newest_fault(folder)):
            detail += f" | {line}"
        progress.detail(detail)
        return False

    if pace.until(ready, deadline=started_s + timeout_s, step_s=_POLL_S):
        return
    if seen.ready:
        cause = newest_cause(parts.deploy.log)
        progress.say(
            f"it serves, but after {timeout_s:.0f} s is still waiting for {', '.join(seen.waiting_for)}"
            + (f" | {cause}" if cause else "")
        )
        return
    line = newest_cause(parts.deploy.log) or newest_line(folder)
    raise StartFailed(
        f"not ready after {timeout_s:.0f} s, still waiting for {', '.join(seen.waiting_for)}"
        + (f"\n    newest in the logs: {line}" if line else "")
        + f"\n{tail(parts.deploy.log)}"
    )


def _readiness(url: str, context: ssl.SSLContext | bool) -> _Readiness:
    try:
        answer = httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False, verify=context).json()
        is_ready = bool(answer.get("ready"))
        waiting_for = tuple(str(part) for part in answer.get("waiting_for", ()))
        return _Readiness(is_ready, waiting_for or (() if is_ready else ("workers",)))
    except (httpx.HTTPError, ValueError, AttributeError):
        return _Readiness(False, ("gateway",))


def _ask_in_steps(config: ClusterConfig, pace: Pace, timeout_s: float) -> FirstAnswer:
    outcome: list[FirstAnswer | Exception] = []

    def run() -> None:
        try:
            outcome.append(ask(config, timeout_s=timeout_s))
        except Exception as error:
            outcome.append(error)

    threading.Thread(target=run, name="first-answer", daemon=True).start()
    if not pace.until(lambda: bool(outcome), deadline=time.monotonic() + timeout_s):
        raise StartFailed(f"no answer to the first request within {timeout_s:.0f} s")
    result = outcome[0]
    if isinstance(result, Exception):
        raise result
    return result


def _with_own_places(config: ClusterConfig, progress: Progress) -> ClusterConfig:
    """Return the configuration for the application: absolute folders, free ports, a resolved model."""
    config = config.on_node(node_address())
    grpc_port = config.gateway.grpc_port
    http_port = _choose_port(config, "http_port", config.gateway.http_port, taken=grpc_port or 0)
    if grpc_port is not None:
        grpc_port = _choose_port(config, "grpc_port", grpc_port, taken=http_port)
    config = _changed(config, "gateway", http_port=http_port, grpc_port=grpc_port)
    config = _with_absolute_files(config)
    files = {
        key: str(Path(value).expanduser().absolute())
        for key in ("ca_file", "cert_file", "key_file", "password_file")
        if (value := getattr(config.membership, key)) is not None
    }
    config = _changed(config, "membership", **files)
    if (keys := config.tier.encryption_keys_file) is not None:
        keys = keys.expanduser().absolute()
        satellites.keeper().load_keyring(keys)  # a keeper would only say in its log why it does not start
        config = _changed(config, "tier", encryption_keys_file=str(keys))
    return with_model_folders(config, progress)


def with_model_folders(config: ClusterConfig, progress: Progress) -> ClusterConfig:
    """Return the configuration with a folder for each of vLLM's models."""
    if config.engine.kind != "vllm":
        return config
    values = config.model_dump(mode="json")
    if config.serves_default:
        path = _folder_of(config.of_model(), progress)
        values["model"] |= {"path": path, "served_name": config.served_name}
        _put_draft_folder(config, "", values["engine"], values["engine"], progress)
    for entry, section in zip(config.models, values["models"], strict=True):
        key = f"models[{entry.name}].model.path"
        section["model"]["path"] = _folder_of(config.of_model(entry.name), progress, key)
        _put_draft_folder(config, entry.name, section["engine"], values["engine"], progress)
    return parse(values)


def _put_draft_folder(
    config: ClusterConfig, entry: str, own: dict[str, Any], of_all: dict[str, Any], progress: Progress
) -> None:
    """Put the folder of a model's draft model where the settings name it, `own` or `of_all`. Raises ConfigError."""
    name = draft_model(config.of_model(entry).engine.args)
    if name:
        key = f"{config.argument_keys('decode', entry)[SPECULATION]}.model"
        with progress.step(f"draft model {name}"):
            folder = model_folder.resolve(name, report=progress.detail, key=key)
        args = own["args"] if SPECULATION in own.get("args", {}) else of_all["args"]
        args[SPECULATION] = {**args[SPECULATION], "model": str(folder)}


def _folder_of(config: ClusterConfig, progress: Progress, key: str = "model.path") -> str:
    check_quality_report(config)
    if config.engine.kind == "vllm":
        read_chat_template(config.model)
    with progress.step(f"model {config.model.path}"):
        path = model_folder.resolve(config.model.path, report=progress.detail, key=key)
    if config.engine.quality_report is not None:
        with progress.step("quality report"):
            geometry = from_config(model_folder.read_config(str(path)), name=str(path))
            weights = weights_revision(path, model_folder.cache_folder() / "weights")
            check_quality_report(config, context_length=geometry.context_length, weights=weights)
    return str(path)


def _with_absolute_files(config: ClusterConfig) -> ClusterConfig:
    dump = config.model_dump(mode="json")
    sections = (dump["gateway"], *(dump[name]["tls"] for name in ("gateway", "worker", "metrics")), dump["tracing"])
    sections = (*sections, dump["gateway"]["jwt"])
    for section in sections:
        for key, value in section.items():
            if key.endswith("_file") and value is not None:
                section[key] = str(Path(value).expanduser().absolute())
    return parse(dump)


def _changed(config: ClusterConfig, section: str, **values: Any) -> ClusterConfig:
    dump = config.model_dump(mode="json")
    dump[section] |= values
    return parse(dump)


def _choose_port(config: ClusterConfig, key: str, port: int, *, taken: int = 0) -> int:
    """Return the gateway's `port`; if 0, a free one besides `taken`."""
    host = config.gateway.host
    if port == 0:
        while (chosen := free_port(host)) == taken:
            pass
        return chosen
    # A gateway that was just killed may hold the port for a moment.
    patience_ends_s = time.monotonic() + _PORT_PATIENCE_S
    while (fault := _why_not_to_bind(host, port)) is not None:
        if fault.errno != errno.EADDRINUSE or time.monotonic() > patience_ends_s:
            raise ConfigError(
                f"gateway.{key}: {host}:{port} cannot be used: {fault.strerror}{_listener_on(port)}; "
                f"choose another with --{key.replace('_', '-')} N (0: any free one)",
                param=f"gateway.{key}",
            )
        time.sleep(0.1)
    return port


def _why_not_to_bind(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier gateway that are still closing do not count as users of the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _listener_on(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            where = connection.laddr
            if connection.status == psutil.CONN_LISTEN and where and where.port == port and connection.pid:
                return f" (process {connection.pid}, {psutil.Process(connection.pid).name()})"
    return ""


def _require_reachable(endpoints: tuple[str, ...]) -> None:
    faults = []
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=3.0):
                return
        except (OSError, ValueError) as error:
            faults.append(f"{endpoint}: {error}")
    raise StartFailed("membership.endpoints: etcd cannot be reached: " + "; ".join(faults))


def _clean(folder: RunFolder, *, keep_logs: bool) -> Cleaned:
    """End every process, then remove their files. Requires the lock."""
    had_state = folder.token_file.exists() or folder.record_file.exists()
    num_processes = end_all(
        folder.marks(),
        before_signal=lambda processes: _record_shared_memory(folder, processes),
        needs_no_grace=is_of_ray,
    )
    removed = shared_memory.remove_abandoned(folder.path)
    folder.clear(keep_logs=keep_logs)
    return Cleaned(num_processes, tuple(file.name for file in removed), had_state)


def _record_shared_memory(folder: RunFolder, processes: tuple[ProcessIdentity, ...]) -> None:
    # Not worth failing for, such as when the disk is full.
    with contextlib.suppress(OSError):
        held = shared_memory.held_by(process.pid for process in processes)
        shared_memory.write_record(folder.path, "all", held)


@contextlib.contextmanager
def _take_over(folder: RunFolder, progress: Progress) -> Iterator[None]:
    """Acquire the lock, interrupting a start that holds it."""
    deadline = time.monotonic() + _HAND_OVER_TIMEOUT_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder.locked("down"))
                break
            except ClusterBusy:
                starting = folder.lock_holder("up")
                if starting is None or time.monotonic() >= deadline:
                    raise
                progress.say(f"interrupting the start that is under way (process {starting.pid})")
                starting.send(signal.SIGTERM)
                starting.wait(deadline - time.monotonic())
        yield


@contextlib.contextmanager
def _deferred_interrupts(pace: Pace) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP only set `pace`'s flag, and go on doing so once it is set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(_signal: int, _frame: FrameType | None) -> None:
        pace.interrupt()

    # What the caller ignores stays ignored: `nohup kvferry up` outlives its terminal.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in previous:
        signal.signal(number, note)
    try:
        yield
    finally:
        # One that comes while the command cleans up and ends would end it at once, and leave processes behind.
        for number, handler in () if pace.is_interrupted else previous.items():
            signal.signal(number, handler)
