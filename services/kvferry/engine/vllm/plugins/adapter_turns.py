"""Schedules requests with adapters so that no adapter waits for ever for a place in a step."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class AdapterTurns:
    """A mixin of vLLM's scheduler with the policy `priority`."""

    lora_config: Any
    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    _ending = 0  # the adapter that gets no later requests, because another one waits for its place

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with without(self._beyond_adapters(), self.waiting, self.kv_holding_waiting):
            return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _beyond_adapters(self) -> list[Any]:
        """Return requests that this step may not begin, since a step has at most `max_loras` adapters."""
        # vLLM passes over them too, but does not count the adapter of a prompt that this step leaves out, and begins
        # later requests of the adapters in use, for which another one may wait for ever. So one of these gets no later
        # requests while another waits.
        if self.lora_config is None:
            return []
        running = Counter(filter(None, map(_adapter_of, self.running)))
        waiting = sorted(each for each in (*self.kv_holding_waiting, *self.waiting) if _adapter_of(each))
        adapters, first = set(running), None
        for request in waiting:
            # Also of one whose pages or grammar are on their way: vLLM sees that they are there when it may begin.
            if _adapter_of(request) in adapters:
                continue
            if len(adapters) == self.lora_config.max_loras:
                first = request
                break
            adapters.add(_adapter_of(request))
        if first is None:
            self._ending = 0
        elif self._ending not in running:
            self._ending = min(running, key=lambda adapter: (running[adapter], adapter), default=0)
        return [
            each
            for each in waiting
            if _adapter_of(each) not in adapters
            or (first is not None and _adapter_of(each) == self._ending and first < each)
        ]


class AdapterScheduler(AdapterTurns, Scheduler):  # type: ignore[misc]
    pass


class AdapterAsyncScheduler(AdapterTurns, AsyncScheduler):  # type: ignore[misc]
    pass


def adapter_scheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """A `scheduler_cls`, as `tenant_scheduler` is."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AdapterAsyncScheduler if is_async else AdapterScheduler)(vllm_config=vllm_config, **kwargs)


@contextlib.contextmanager
def without(requests: list[Any], *queues: Any) -> Iterator[None]:
    """Leave requests out of vLLM's priority queues."""
    left_out = set(requests)
    removed = [(queue, [each for each in queue if each in left_out]) for queue in queues if left_out]
    for queue, some in removed:
        queue.remove_requests(some)
    try:
        yield
    finally:
        for queue, some in removed:
            for request in some:
                queue.add_request(request)


def _adapter_of(request: Any) -> int:
    return 0 if request.lora_request is None else int(request.lora_request.lora_int_id)
