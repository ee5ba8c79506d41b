"""The one intake of requests, for HTTP and gRPC: each limit before the work that it limits, then rendering."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.config import is_of_entry
from kvferry.engine.base import Asker, CacheSalt, RenderedPrompt, Renderer, RequestId
from kvferry.gateway.admission import Claim
from kvferry.gateway.bodies.chat_images import ChatImages, image_parts
from kvferry.gateway.bodies.openai_bodies import ChatBody, CompletionBody, num_prompts
from kvferry.gateway.canary import beginning_of
from kvferry.gateway.generation import Generation
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.metrics import GatewayMetrics
from kvferry.gateway.models import AdapterNames, Models, Route
from kvferry.gateway.request_trace import RequestTrace
from kvferry.gateway.timeouts import TokenTimeouts
from kvferry.router.dispatch import Dispatcher
from kvferry.router.request import Prompt, Request

Body = ChatBody | CompletionBody


class Intake:
    """A protocol parses a request and formats its answer; whether and how it is served is decided here."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        models: Models,
        adapters: AdapterNames,
        timeouts: TokenTimeouts,
        images: ChatImages,
    ) -> None:
        self.models = models
        self.adapters = adapters
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._timeouts = timeouts
        self._images = images

    async def begin(
        self,
        id_prefix: str,
        body: Body,
        fields: dict[str, Any],
        begun_ns: int,
        *,
        claim: Claim,
        tenant: Tenant,
        trace: RequestTrace | None,
        may_be_aggregated: bool = True,
        deadline_s: float | None = None,
    ) -> Generation:
        """Return the request's answer, to be run once; `claim` holds its choices, prompt tokens and images.

        `fields` are the body's, for the renderer; reading it began at `begun_ns` (Unix time). `deadline_s`, of
        `time.monotonic`, is the client's own. Unless `may_be_aggregated`, prefill workers compute the prompts.

        Raises InvalidRequest, ModelNotFound, Overloaded, and NoDecodeWorker while no worker has the adapter.
        """
        messages = fields["messages"] if isinstance(body, ChatBody) else ()
        route = claim.route = self._route(body, tenant, messages)
        n = body.n or 1
        num_choices = n if isinstance(body, ChatBody) else n * num_prompts(body)
        claim.take_choices(num_choices)
        claim.count(num_choices)
        asker = asker_of(tenant, body.cache_salt)
        with route.model.rendering() as renderer:
            if isinstance(body, ChatBody):
                # Images were tested with the default model alone.
                takes_images = renderer.takes_images and not is_of_entry(route.pool)
                images = await self._images.load(messages, claim, takes_images=takes_images)
                rendered = [_without_hidden_logprobs(body, await renderer.render_chat(fields, images, asker=asker))]
            else:
                rendered = list(await renderer.render_completion(fields, asker=asker))
        route.model.require_supported(rendered, route.pool)
        claim.take_answer(rendered, n)
        answer_id = f"{id_prefix}-{secrets.token_hex(12)}"
        requests = self._requests(answer_id, body, rendered, tenant, route, deadline_s)
        generation = Generation(
            answer_id,
            requests,
            n,
            tenant,
            self._dispatcher,
            self._metrics,
            self._timeouts,
            may_be_aggregated=may_be_aggregated,
            trace=trace,
        )
        claim.work = generation
        if trace is not None:
            trace.rendered(answer_id, body, requests, begun_ns, route.model.label)
        return generation

    async def tokenize(
        self, body: Body, fields: dict[str, Any], *, claim: Claim, tenant: Tenant
    ) -> tuple[Sequence[int], int]:
        """Return a prompt's tokens, and the model's context in tokens. Raises as `begin`."""
        route = self._route(body, tenant, ())
        claim.count(1)
        with route.model.rendering() as renderer:
            return await _token_ids(renderer, body, fields, asker_of(tenant, None)), renderer.max_model_len()

    def _route(self, body: Body, tenant: Tenant, messages: Sequence[Mapping[str, Any]]) -> Route:
        model, adapter = self.adapters.resolve(body.model, tenant)
        return self.models.route(
            model,
            tenant,
            lambda: beginning_of(body),
            adapter=adapter,
            has_images=lambda: any(image_parts(messages)),
        )

    def _requests(
        self,
        answer_id: str,
        body: Body,
        rendered: Sequence[RenderedPrompt],
        tenant: Tenant,
        route: Route,
        deadline_s: float | None,
    ) -> list[Request]:
        adapter = self._dispatcher.adapter_key(route.adapter, route.pool) if route.adapter else ""
        salt: str = salt_of(tenant, body.cache_salt)
        if is_of_entry(route.pool):
            # Models have tokens in common: without this, pages of one would be looked for under the keys of another.
            salt = f"{route.pool}/{salt}"
        if body.wanted_s is not None:
            self._metrics.hinted_requests.labels("wanted" if body.wanted_s else "end").inc()
        if deadline_s is None:
            deadline_s = time.monotonic() + self._dispatcher.request_timeout_s
        requests: list[Request] = []
        for one in rendered:
            token_ids = one.token_ids if isinstance(one.token_ids, array) else array("I", one.token_ids)
            prompt = Prompt(token_ids, salt, adapter, one.images)
            for i in range(body.n or 1):
                seed = one.sampling.seed
                requests.append(
                    Request(
                        RequestId(f"{answer_id}-{len(requests)}"),
                        prompt,
                        one.sampling.with_seed(_wrap_int64(seed + i) if seed is not None else None),
                        one.parse,
                        tenant.contract,
                        body.wanted_s,
                        deadline_s,
                        route.pool,
                    )
                )
        return requests


def salt_of(tenant: Tenant, cache_salt: str | None) -> CacheSalt:
    return tenant.cache_salt if cache_salt is None else tenant.salt_of(cache_salt)


def asker_of(tenant: Tenant, cache_salt: str | None) -> Asker:
    return Asker(tenant.name, salt_of(tenant, cache_salt))


def _without_hidden_logprobs(body: ChatBody, rendered: RenderedPrompt) -> RenderedPrompt:
    if rendered.parse is None or body.include_reasoning is not False or rendered.sampling.logprobs is None:
        return rendered
    # Log-probabilities would reveal the tokens of the reasoning that is left out.
    sampling = rendered.sampling.without_logprobs()
    return RenderedPrompt(rendered.token_ids, sampling, rendered.parse, rendered.images)


async def _token_ids(renderer: Renderer, body: Body, fields: dict[str, Any], asker: Asker) -> Sequence[int]:
    if isinstance(body, ChatBody):
        return (await renderer.render_chat(fields, asker=asker)).token_ids
    (rendered,) = await renderer.render_completion(fields, asker=asker)
    return rendered.token_ids


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
