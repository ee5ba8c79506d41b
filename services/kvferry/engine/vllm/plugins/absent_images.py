"""Ends requests whose images an engine would have to encode, and has not got."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

log = logging.getLogger(__name__)

# The pages of such a prompt come from another engine. If they do not come, or are preempted, vLLM would compute the
# prompt here, and would end the engine for an image without data. A request in `encoder_cache_mismatch_reqs` is ended
# by vLLM at the end of its step, with FinishReason.ERROR.

_plain = Scheduler._try_schedule_encoder_inputs


def end_requests_of_absent_images() -> None:
    """Idempotent."""
    Scheduler._try_schedule_encoder_inputs = _schedule_encoder_inputs


def _schedule_encoder_inputs(
    scheduler: Any,
    request: Any,
    num_computed_tokens: int,
    num_new_tokens: int,
    encoder_compute_budget: int,
    **shift: int,
) -> Any:
    if num_new_tokens and needs_absent_image(request, num_computed_tokens):
        log.warning("request %s: the pages of its images are not here, nor are the images", request.request_id)
        scheduler.encoder_cache_mismatch_reqs.add(request.request_id)
        return [], 0, encoder_compute_budget, [], []
    return _plain(scheduler, request, num_computed_tokens, num_new_tokens, encoder_compute_budget, **shift)


def needs_absent_image(request: Any, num_computed_tokens: int) -> bool:
    return any(
        feature.data is None and feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        for feature in request.mm_features
    )
