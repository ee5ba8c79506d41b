"""Admission of requests to the simulator."""

from __future__ import annotations

import logging
import math
from collections.abc import Container

from kvferry.engine.base import EngineRequest, RequestId, TransferParams, validate_adapter, validate_continuation
from kvferry.errors import ContextLengthExceeded, InvalidRequest
from kvferry.observability.tracing import TraceContext
from kvferry.pages.keys import TOKEN_BYTES, pack_tokens
from kvferry_sim.answer import Answer
from kvferry_sim.kv_transfer import KvTransferError, Ticket
from kvferry_sim.sequence import TokenSequence
from kvferry_sim.settings import SimConfig
from kvferry_sim.tokenizer import SimTokenizer

log = logging.getLogger(__name__)


def to_sequence(
    request: EngineRequest,
    sim: SimConfig,
    tokenizer: SimTokenizer,
    *,
    block_size: int,
    max_tokens_total: int,
    seed: int,
    revision: str = "",
    due_ms: float = 0.0,
    trace: TraceContext | None = None,
) -> TokenSequence:
    continued = request.continued
    packed = bytearray(pack_tokens(request.prompt_token_ids))
    given = list(request.prompt_token_ids[-continued.num_tokens :]) if continued is not None else []
    answer = Answer(
        packed[: len(packed) - TOKEN_BYTES * len(given)],
        request.sampling,
        tokenizer,
        answer_tokens=sim.answer_tokens,
        default_seed=seed,
        revision=revision,
        adapter=request.adapter,
    )
    if continued is not None:
        answer.resume(given, continued.num_chars)
    ticket = ticket_of(request.transfer_params) if request.transfer_params is not None else None
    return TokenSequence(request, answer, packed, block_size, max_tokens_total, ticket, due_ms, trace)


def ticket_of(params: TransferParams) -> Ticket | None:
    """Return None, with a warning, unless a simulator made the parameters."""
    try:
        return Ticket.from_params(params)
    except KvTransferError as error:
        log.warning("a prompt is computed here: %s", error)
        return None


def validate_request(
    request: EngineRequest,
    sim: SimConfig,
    *,
    vocabulary_size: int,
    block_size: int,
    active: Container[RequestId],
    adapters: Container[str] = (),
) -> int:
    """Return the limit of prompt and answer together. Raises InvalidRequest."""
    sampling = request.sampling
    validate_adapter(request)
    validate_continuation(request)
    if request.keep_for_transfer and request.transfer_params is not None:
        raise InvalidRequest("a request is either kept for transfer or pulled, not both")
    if request.images:
        raise InvalidRequest("the sim engine takes no images", param="messages")
    if request.request_id in active:
        raise InvalidRequest(f"request {request.request_id} is running already")
    if request.adapter and request.adapter not in adapters:
        name = request.adapter.rpartition("@")[0]
        raise InvalidRequest(f"this engine has no adapter {name[:64]!r} with the files that were asked for")
    if sampling.structured_outputs:
        raise InvalidRequest("the sim engine writes plain text only", param="structured_outputs")
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {sampling.max_tokens}", param="max_tokens")
    _validate_prompt(request, sim.max_model_len, vocabulary_size)
    num_given = request.continued.num_tokens if request.continued is not None else 0
    total = min(len(request.prompt_token_ids) - num_given + sampling.max_tokens, sim.max_model_len)
    # The KV of the last token is never computed, so it needs no space.
    num_pages = math.ceil((total - 1) / block_size)
    if num_pages > sim.num_pages:
        raise InvalidRequest(
            f"prompt and answer may need {num_pages} pages of {block_size} tokens; this engine has "
            f"{sim.num_pages} in all",
            param="max_tokens",
        )
    return total


def _validate_prompt(request: EngineRequest, max_model_len: int, vocabulary_size: int) -> None:
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    highest, lowest = max(request.prompt_token_ids), min(request.prompt_token_ids)
    if lowest < 0 or highest >= vocabulary_size:
        raise InvalidRequest(
            f"token ids go from 0 to {vocabulary_size - 1}; the prompt has {lowest} to {highest}", param="prompt"
        )
    if num_prompt >= max_model_len:
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens; the prompt has {num_prompt} and leaves no room for an "
            "answer",
            param="prompt",
        )
