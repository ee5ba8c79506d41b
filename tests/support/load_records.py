"""Records of a load test whose times are known."""

from __future__ import annotations

from kvferry_loadtest.plan import RequestId
from kvferry_loadtest.record import Outcome, Record


def record(
    due_s: float = 0.0,
    *,
    late_s: float = 0.0,
    ttft_s: float = 0.1,
    itl_s: float = 0.01,
    num_tokens: int = 11,
    outcome: Outcome = Outcome.OK,
    **values: object,
) -> Record:
    """Sent `late_s` after it was due, first token `ttft_s` after that."""
    made = Record(
        request_id=RequestId(0),
        session_id="s",
        turn=0,
        tenant="",
        warmup=False,
        due_s=due_s,
        predecessor_wait_s=0.0,
        outcome=outcome,
    )
    if outcome is not Outcome.SKIPPED:
        made.sent_s = due_s + late_s
        made.end_s = made.sent_s + ttft_s
    if outcome is Outcome.OK:
        assert made.sent_s is not None
        made.token_s = [made.sent_s + ttft_s + i * itl_s for i in range(num_tokens)]
        made.first_token_s, made.end_s = made.token_s[0], made.token_s[-1] + 0.001
        made.completion_tokens, made.prompt_tokens = num_tokens, 100
    for name, value in values.items():
        setattr(made, name, value)
    return made
