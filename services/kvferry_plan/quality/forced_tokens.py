"""Records next-token distributions while a given answer is forced on a request: a logits processor of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

# Value in SamplingParams.extra_args: {"file": path of a float32 matrix, "tokens": ids that the answer has to have}.
FORCED = "kvferry_forced_tokens"


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """Writes log-probabilities of position i into row i of the request's file."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        forced = (params.extra_args or {}).get(FORCED)
        if forced is None:
            return None
        tokens = forced["tokens"]
        rows: Any = np.load(forced["file"], mmap_mode="r+")

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            # The logits of a prompt's earlier chunks come here too, and are overwritten by those of its end.
            position = len(output_ids)
            rows[position] = torch.log_softmax(logits.float(), dim=-1)[: rows.shape[1]].cpu().numpy()
            logits.fill_(float("-inf"))
            logits[tokens[position]] = 0.0
            return logits

        return force
