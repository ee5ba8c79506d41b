"""What of a request's record tenants see."""

from __future__ import annotations

import json

from kvferry.gateway.record_views import HIDDEN, explained, for_tenant
from kvferry.membership.base import MemberId
from kvferry.router.placement import Placement, Reason
from kvferry.router.request import RequestRecord


def test_names_of_workers_are_hidden_and_what_is_the_tenants_own_is_not() -> None:
    record = RequestRecord(
        request_id="cmpl-1-0",
        reason="disaggregated",
        prefill_worker=MemberId("prefill-7"),
        decode_worker=MemberId("decode-7"),
        prefill_failure="prefill-6 said something",
        unequal_pages="its block size is 16, and here 32",
        lost_workers=(MemberId("decode-5"), MemberId("decode-6")),
        error_code="worker_lost",
        resumed_after=[3],
        num_preemptions=1,
        placements=[
            Placement(MemberId("prefill-7"), MemberId("decode-7"), Reason.DISAGGREGATED),
            Placement(None, MemberId("decode-7"), Reason.PREFILL_BUSY),
        ],
    )
    whole = explained(record)
    shown = for_tenant(whole)
    assert "-7" in json.dumps(whole)
    assert not any(text in json.dumps(shown) for text in ("-5", "-6", "-7", "block size"))
    assert shown == whole | {
        "prefill_worker": HIDDEN,
        "decode_worker": HIDDEN,
        "prefill_failure": HIDDEN,
        "unequal_pages": HIDDEN,
        "lost_workers": [HIDDEN, HIDDEN],
        "choices": [
            {"reason": "disaggregated", "prefill": HIDDEN, "decode": HIDDEN},
            {"reason": "prefill_busy", "prefill": None, "decode": HIDDEN},
        ],
    }
    nothing = for_tenant(explained(RequestRecord()))
    assert (nothing["prefill_worker"], nothing["prefill_failure"], nothing["lost_workers"]) == (None, None, [])
