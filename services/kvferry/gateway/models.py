"""The models of a gateway: who may ask for which, by which name, and which of them answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from kvferry.arguments.vllm_arguments import SPECULATION, speculates
from kvferry.config import DEFAULT_POOL, AdaptersConfig, ClusterConfig, entry_of
from kvferry.config.engine import Proof
from kvferry.engine.base import RenderedPrompt, Renderer, RenderOutcomes
from kvferry.errors import InvalidRequest, KvferryError, ModelNotFound, NoDecodeWorker, NotReady
from kvferry.gateway.canary import diverted_to
from kvferry.gateway.identity.tenants import Tenant
from kvferry.link.identity import GatewayIdentity, Identity
from kvferry.proof.verdict import TEXT, longest_prompt
from kvferry.util.task_set import TaskSet

log = logging.getLogger(__name__)


class ModelNames:
    # A tenant whose contract names a pool is served there and nowhere else, under every name that it may use. Others
    # are served by the default pool, and by those that are not dedicated under their own names.

    def __init__(self, config: ClusterConfig) -> None:
        self.default = config.served_name
        self._name_of = {name: pool.served_name for name, pool in config.pools.items()}
        self._open_name_to_pool = {
            pool.served_name: name for name, pool in config.pools.items() if pool.served_name and not pool.dedicated
        }

    def of(self, tenant: Tenant) -> dict[str, str]:
        """Return pools by name. Raises NoDecodeWorker for a tenant of a pool that is not configured here."""
        if not tenant.pool:
            return {self.default: "", **self._open_name_to_pool}
        if tenant.pool not in self._name_of:
            raise NoDecodeWorker(
                f"this tenant is served by pool {tenant.pool[:64]!r}, and this gateway's configuration has no such pool"
            )
        names = filter(None, (self.default, self._name_of[tenant.pool]))
        return dict.fromkeys(names, tenant.pool)


# Between two attempts to load a model whose files cannot be read: a job may still fill its folder.
RETRY_FIRST_S = 1.0
RETRY_MOST_S = 30.0
_MIN_MIN_P = 1e-5  # vLLM takes less for none
MAX_NAMED = 64  # names in the message about an unknown one


class GatewayModel:
    """A model as it is rendered and computed; after a change it is another one."""

    def __init__(self, pool: str, config: ClusterConfig, folder: str) -> None:
        # `config` is of this model alone.
        self.pool = pool
        self.label = entry_of(pool) or DEFAULT_POOL
        self.config, self.folder = config, folder
        self.identity: GatewayIdentity | None = None
        self.renderer: Renderer | None = None
        self._num_rendering = 0
        self._is_retired = False
        pools = ("", *config.pools)
        self.volumes = {each: config.volumes_of(each) for each in pools}  # of pools by name, as `volumes_of`
        engines = {each: config.engine_of("decode", each) for each in pools}
        self.proofs: dict[str, Proof] = {each: engine.needed_proof for each, engine in engines.items()}  # likewise
        self._speculating = frozenset(each for each, engine in engines.items() if speculates(engine.args))

    def __repr__(self) -> str:
        return f"<GatewayModel {self.label} {'retired' if self._is_retired else 'loaded' if self.renderer else 'new'}>"

    @contextlib.contextmanager
    def rendering(self) -> Iterator[Renderer]:
        """Raises NotReady."""
        if self.renderer is None:
            raise NotReady(f"this gateway is loading the model {self.label!r}")
        self._num_rendering += 1
        try:
            yield self.renderer
        finally:
            self._num_rendering -= 1
            if self._is_retired and not self._num_rendering:
                self._closing.spawn(self.renderer.close())

    def require_supported(self, prompts: Iterable[RenderedPrompt], pool: str) -> None:
        """Raises InvalidRequest for sampling parameters that the pool's decode engines would refuse."""
        if not self.speculates(pool):
            return
        for prompt in prompts:
            sampling = prompt.sampling
            params = {"min_p": sampling.min_p > _MIN_MIN_P, "logit_bias": bool(sampling.logit_bias)}
            for param, is_set in params.items():
                if is_set:
                    raise InvalidRequest(
                        f"{param}, of the request or of the model's generation_config.json, is not supported where "
                        f"decode workers speculate ({SPECULATION} in engine.args or decode.engine.args)",
                        param=param,
                    )

    def speculates(self, pool: str) -> bool:
        return bool(self._speculating) and entry_of(pool) in self._speculating

    def retire(self, closing: TaskSet) -> None:
        # Its renderer is closed once no request is rendered.
        if not self._is_retired:
            self._is_retired, self._closing = True, closing
            if self.renderer is not None and not self._num_rendering:
                closing.spawn(self.renderer.close())


class Route(msgspec.Struct, frozen=True):
    """Where a request goes. `asked` is the label of the model whose name it says."""

    model: GatewayModel
    pool: str
    asked: str
    adapter: str = ""


@dataclass(slots=True)
class _Entry:
    # An entry of `models`, or the default model. After a change the earlier model answers until the new one has a
    # decode worker.
    current: GatewayModel
    names: ModelNames
    aliases: tuple[str, ...]
    canary: Mapping[str, float]
    earlier: GatewayModel | None = None


class Models:
    def __init__(
        self,
        config: ClusterConfig,
        folder: str,
        *,
        make_renderer: Callable[[ClusterConfig, str], Renderer],
        make_identity: Callable[[ClusterConfig, str], Identity],
        has_workers: Callable[[str], bool],
        on_change: Callable[[], None],
    ) -> None:
        """`has_workers` is of decode workers; `folder` the default model's."""
        self._folder = folder
        self._make_renderer = make_renderer
        self._make_identity = make_identity
        self._has_workers = has_workers
        self._on_change = on_change
        self._entries: dict[str, _Entry] = {}  # by label
        self._loading: dict[str, asyncio.Task[None]] = {}  # by pool
        self._closing = TaskSet()
        self.is_started = False  # the default model is loaded, if there is one
        self._past_outcomes = RenderOutcomes()  # of models that are gone
        self.pools: tuple[str, ...] = ()  # by their configured names, beside the default one
        self._set(config)

    def __repr__(self) -> str:
        return f"<Models {[entry.current for entry in self._entries.values()]}>"

    def __iter__(self) -> Iterator[GatewayModel]:
        for entry in self._entries.values():
            yield entry.current
            if entry.earlier is not None:
                yield entry.earlier

    @property
    def default(self) -> str:
        # The name in spans that begin before the request is read.
        return next((entry.names.default for entry in self._entries.values()), "none")

    @property
    def longest_context(self) -> int:
        """In tokens."""
        return max((model.renderer.max_model_len() for model in self if model.renderer is not None), default=0)

    @property
    def is_loaded(self) -> bool:
        # Not before the default model, which is asked for most, and may end the start.
        return self.is_started and any(model.renderer is not None for model in self)

    def missing(self) -> list[str]:
        """Return labels of models without a renderer."""
        return [label for label, entry in self._entries.items() if entry.current.renderer is None]

    def ready(self) -> dict[str, bool]:
        answering = {label: self._answering(entry) for label, entry in self._entries.items()}
        return {
            label: model.renderer is not None and self._has_workers(model.pool) for label, model in answering.items()
        }

    def identity_of(self, pool: str) -> GatewayIdentity | None:
        """None: of a model that is not served here."""
        model = self._model_of(pool)
        return model.identity if model is not None else None

    def volumes_of(self, pool: str) -> str | None:
        model = self._model_of(pool)
        return model.volumes.get(entry_of(pool)) if model is not None else None

    def proof_of(self, pool: str) -> Proof:
        """Return `engine.proof` of the pool's decode engines."""
        model = self._model_of(pool)
        return model.proofs.get(entry_of(pool), "required") if model is not None else "required"

    async def tokens_of_text(self, pool: str) -> list[int]:
        """Return the tokens of a text, for prompts of proofs. Raises NotReady."""
        model = self._model_of(pool)
        if model is None:
            raise NotReady("this gateway serves no model in this pool")
        with model.rendering() as renderer:
            prompts = await renderer.render_completion({"prompt": list(TEXT), "max_tokens": 1})
        return [token for prompt in prompts for token in prompt.token_ids]

    def longest_prompt(self, pool: str, block_size: int) -> int:
        """Return the tokens of the longest prompt of a proof."""
        model = self._model_of(pool)
        if model is None or model.renderer is None:
            return 0
        device = model.config.engine_of("decode", entry_of(pool)).device
        return longest_prompt(model.renderer.max_model_len(), block_size, on_gpu=device == "gpu")

    def _model_of(self, pool: str) -> GatewayModel | None:
        for model in self:
            if model.pool == pool:
                return model
        default = self._entries.get(DEFAULT_POOL)
        return default.current if default is not None and entry_of(pool) == pool else None

    def outcomes(self) -> RenderOutcomes:
        """Return sums, with models that are gone."""
        renderers = [model.renderer for model in self if model.renderer is not None]
        return functools.reduce(_sum, (renderer.outcomes for renderer in renderers), self._past_outcomes)

    # Names

    def labels_of(self, tenant: Tenant) -> dict[str, str]:
        """Return models' labels by the names that the tenant may ask for. Raises as `route`."""
        return {name: label for name, (label, _) in self._names(tenant).items()}

    def of(self, tenant: Tenant) -> dict[str, int]:
        """Return the context in tokens, by names that the tenant may ask for now. Raises as `route`."""
        found = {}
        for name, (label, _) in self._names(tenant).items():
            model = self._answering(self._entries[label])
            if model.renderer is not None:
                found[name] = model.renderer.max_model_len()
        return found

    def route(
        self,
        name: str,
        tenant: Tenant,
        conversation: Callable[[], bytes] = bytes,
        *,
        adapter: str = "",
        has_images: Callable[[], bool] = lambda: False,
        param: str | None = "model",
    ) -> Route:
        """Raises ModelNotFound, and NoDecodeWorker for a tenant whose pool is not configured here.

        `conversation` returns its beginning (`beginning_of`); `param` is the request's field.
        """
        names = self._names(tenant)
        if name not in names:
            served = list(names)
            more = f" and {len(served) - MAX_NAMED} more" if len(served) > MAX_NAMED else ""
            raise ModelNotFound(
                f"the model {name[:256]!r} does not exist; served here: {', '.join(served[:MAX_NAMED])}{more}",
                param=param,
            )
        asked, pool = names[name]
        entry = self._entries[asked]
        # Neither a contract nor a name of a pool or an adapter leads to another model. Images are for the default model
        # alone: to divert them would refuse a share of the conversations.
        if entry.canary and not (tenant.pool or pool or adapter or has_images()):
            target = self._entries[diverted_to(entry.canary, tenant.name, asked, conversation) or asked]
            model = self._answering(target)
            if target is not entry and model.renderer is not None and self._has_workers(model.pool):
                return Route(model, model.pool, asked)
        model = self._answering(entry)
        return Route(model, pool if asked == DEFAULT_POOL else model.pool, asked, adapter)

    def _names(self, tenant: Tenant) -> Mapping[str, tuple[str, str]]:
        # Labels, and pools of the default model, by name. Each request asks, and they change with the models alone.
        names = self._names_by_pool.get(tenant.pool)
        if names is None:
            names = self._names_by_pool[tenant.pool] = self._find_names(tenant)
        return names

    def _find_names(self, tenant: Tenant) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        # Records of earlier releases may have a pool called `default`, which is not the default one.
        own = self._entries.get(tenant.pool) if tenant.pool != DEFAULT_POOL else None
        if own is not None:
            return dict.fromkeys((own.names.default, *own.aliases), (tenant.pool, ""))
        default = self._entries.get(DEFAULT_POOL)
        if default is not None:
            pools = default.names.of(tenant)
            found = {name: (DEFAULT_POOL, pool) for name, pool in pools.items()}
            found |= dict.fromkeys(default.aliases, (DEFAULT_POOL, pools[default.names.default]))
        elif tenant.pool:
            raise NoDecodeWorker(
                f"this tenant is served by pool {tenant.pool[:64]!r}, and this gateway's configuration has no such pool"
            )
        return found if tenant.pool else found | self._entry_names

    def _answering(self, entry: _Entry) -> GatewayModel:
        earlier, current = entry.earlier, entry.current
        if earlier is None:
            return current
        if (current.renderer is not None and self._has_workers(current.pool)) or not self._has_workers(earlier.pool):
            entry.earlier = None
            self._retire([earlier])
            return current
        return earlier

    # Loading

    def apply(self, config: ClusterConfig) -> None:
        """Serve the models of a configuration. Those that did not change stay as they are."""
        self._set(config)
        if self.is_started:
            self._load_missing()
        self._on_change()

    def _set(self, config: ClusterConfig) -> None:
        wanted = {entry.name: (entry.pool, entry.model) for entry in config.models}
        if config.serves_default:
            wanted = {DEFAULT_POOL: ("", config.model), **wanted}
        before, self._entries = self._entries, {}
        self._names_by_pool: dict[str, dict[str, tuple[str, str]]] = {}  # of contracts
        for label, (pool, model) in wanted.items():
            entry = before.pop(label, None)
            earlier = None if entry is None else entry.earlier
            if entry is None or entry.current.pool != pool:
                own = config.of_model("" if label == DEFAULT_POOL else label)
                current = GatewayModel(pool, own, self._folder if label == DEFAULT_POOL else own.model.path)
                if entry is not None:
                    # After two changes in a row, the model that answers stays until the newest one can answer.
                    earlier = self._answering(entry)
                    both = [entry.current, *([entry.earlier] if entry.earlier is not None else [])]
                    if (same := next((each for each in both if each.pool == pool), None)) is not None:
                        current, earlier = same, entry.current  # the change was undone
                    self._retire(each for each in both if each not in (current, earlier))
                names = ModelNames(own if label == DEFAULT_POOL else own.model_copy(update={"pools": {}}))
            else:
                current, names = entry.current, entry.names
            self._entries[label] = _Entry(current, names, model.aliases, dict(model.canary), earlier)
        self._retire(model for entry in before.values() for model in (entry.current, entry.earlier) if model)
        self.pools = (*config.pools, *(entry.name for entry in config.models))
        self._entry_names = {
            name: (label, "")
            for label, entry in self._entries.items()
            if label != DEFAULT_POOL
            for name in (entry.names.default, *entry.aliases)
        }

    async def identify(self) -> None:
        """Read what links of the default model compare. Raises ConfigError."""
        default = self._entries.get(DEFAULT_POOL)
        if default is not None:
            model = default.current
            await self._identify(model)

    async def _identify(self, model: GatewayModel) -> None:
        own = await asyncio.to_thread(self._make_identity, model.config, model.folder)
        model.identity = GatewayIdentity(own)

    async def load(self) -> None:
        """Load the default model, and begin with the others. Raises for the default model only."""
        for model in self:
            if model.pool:
                self._begin_loading(model)
        default = self._entries.get(DEFAULT_POOL)
        if default is not None:
            await self._load(default.current)
        self.is_started = True
        self._load_missing()  # what came meanwhile

    async def close(self) -> None:
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._retire(list(self))
        await self._closing.wait()

    def _load_missing(self) -> None:
        for model in self:
            if model.renderer is None:
                self._begin_loading(model)

    def _begin_loading(self, model: GatewayModel) -> None:
        loading = self._loading.get(model.pool)
        # One that is cancelled loads for a model of the same settings, which is gone.
        if loading is None or loading.cancelling():
            self._loading[model.pool] = asyncio.create_task(self._keep_loading(model))

    async def _keep_loading(self, model: GatewayModel) -> None:
        pause_s = RETRY_FIRST_S
        try:
            while model.renderer is None:
                try:
                    await self._load(model)
                except (KvferryError, OSError, ValueError) as error:
                    log.error("the model %s cannot be served yet: %s", model.label, str(error)[:1000])
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_MOST_S)
        except Exception:
            log.exception("the model %s cannot be served", model.label)
        finally:
            if self._loading.get(model.pool) is asyncio.current_task():
                del self._loading[model.pool]

    async def _load(self, model: GatewayModel) -> None:
        if model.identity is None:
            await self._identify(model)
            self._on_change()
        making = asyncio.create_task(asyncio.to_thread(self._make_renderer, model.config, model.folder))
        try:
            renderer = await asyncio.shield(making)
        except asyncio.CancelledError:
            self._closing.spawn(_close_made(making))  # its thread goes on
            raise
        renderer.start()
        model.renderer = renderer
        if model not in tuple(self):
            model.retire(self._closing)  # it was removed meanwhile
        self._on_change()

    def _retire(self, models: Iterable[GatewayModel]) -> None:
        for model in models:
            if (loading := self._loading.get(model.pool)) is not None and model.renderer is None:
                loading.cancel()
            if model.renderer is not None:
                self._past_outcomes = _sum(self._past_outcomes, model.renderer.outcomes)
            model.retire(self._closing)


async def _close_made(making: asyncio.Task[Renderer]) -> None:
    with contextlib.suppress(Exception):  # of a load that nothing waits for
        await (await making).close()


def _sum(one: RenderOutcomes, other: RenderOutcomes) -> RenderOutcomes:
    def added(name: str) -> Mapping[str, int]:
        found = Counter(getattr(one, name))
        found.update(getattr(other, name))  # unlike `+`, which drops zeros
        return found

    return RenderOutcomes(*map(added, one.__struct_fields__))


_MAX_NAMED = 16  # names in an error


class AdapterNames:
    # An adapter is asked for as NAME, of the default model, or as MODEL:NAME. One that another tenant owns is refused
    # in the same words as one that does not exist.

    def __init__(self, models: Models, config: AdaptersConfig) -> None:
        self._models = models
        self._name_to_tenants = {name: frozenset(adapter.tenants) for name, adapter in config.served.items()}

    def of(self, tenant: Tenant) -> dict[str, str]:
        """Return adapters, each with the model that it changes. Raises as `Models.route`."""
        # A tenant whose pool is an entry of `models` has no adapter: they are of the default model.
        if not self._name_to_tenants or self._models.labels_of(tenant).get(self._default) != DEFAULT_POOL:
            return {}
        return dict.fromkeys((name for name in self._name_to_tenants if self._is_open(name, tenant)), self._default)

    def resolve(self, name: str, tenant: Tenant, *, param: str | None = "model") -> tuple[str, str]:
        """Return the model's name and the adapter's, or an empty one. Raises as `Models.route`."""
        if not self._name_to_tenants:
            return name, ""
        models = self._models.labels_of(tenant)
        if name in models:
            return name, ""
        model, colon, adapter = name.rpartition(":")
        if not colon:
            model = self._default
        if models.get(model) == DEFAULT_POOL and self._is_open(adapter, tenant):
            return model, adapter
        raise ModelNotFound(
            f"the model {name!r} does not exist; served here: {_named([*models, *self.of(tenant)])}", param=param
        )

    @property
    def _default(self) -> str:
        return self._models.default

    def _is_open(self, name: str, tenant: Tenant) -> bool:
        tenants = self._name_to_tenants.get(name)
        return tenants is not None and (not tenants or tenant.name in tenants)


def _named(names: Collection[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(list(names)[:_MAX_NAMED]) + more
