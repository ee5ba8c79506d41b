"""gateway/intake.py: HTTP and gRPC check the same limits in the same order, and give back what they held."""

from __future__ import annotations

import grpc
import httpx
import pytest

from kvferry.gateway.admission import MAX_STEP_LOGPROB_ENTRIES
from kvferry.inference.v1 import inference_pb2 as pb
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, running
from .test_access import bearer, grpc_to
from .test_gateway_grpc import stub_on
from .test_tenants import IN_ETCD, admin_of, tenant_with_key

MAX_CHOICES = 120  # of the gateway, and half of them for one tenant
TENANTS_CHOICES = 50
NUM_TOKENS = 200  # of a prompt
MAX_PROMPT_TOKENS = CONTEXT = 8192
MANY = 45  # with so many log-probabilities each:
NUM_TOP = 10
assert MANY * NUM_TOKENS > MAX_PROMPT_TOKENS
assert MANY * NUM_TOP > MAX_STEP_LOGPROB_ENTRIES
assert MANY < TENANTS_CHOICES < MAX_CHOICES // 2

# Each request breaks its own limit and all after it: model, choices, prompt tokens, whether it has log-probabilities;
# the error's HTTP status and a part of its message.
REQUESTS = [
    ("other", MAX_CHOICES + 1, 2 * CONTEXT, True, 404, "the model 'other' does not exist"),
    (MODEL, MAX_CHOICES + 1, 2 * CONTEXT, True, 400, f"gateway.max_requests is {MAX_CHOICES}"),
    (MODEL, MAX_CHOICES // 2 + 1, 2 * CONTEXT, True, 400, "a tenant may have half"),
    (MODEL, TENANTS_CHOICES + 1, 2 * CONTEXT, True, 400, "max_choices"),
    (MODEL, MANY, 2 * CONTEXT, True, 400, "context"),
    (MODEL, MANY, NUM_TOKENS, True, 400, f"{MAX_STEP_LOGPROB_ENTRIES} a token are allowed"),
    (MODEL, MANY, NUM_TOKENS, False, 400, f"; a gateway takes {MAX_PROMPT_TOKENS}"),
]


async def test_both_protocols_check_limits_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.gateway.admission.MAX_PENDING_PROMPT_TOKENS", MAX_PROMPT_TOKENS)
    gateway = {**IN_ETCD, "max_requests": MAX_CHOICES}
    async with (
        running(gateway=gateway) as cluster,
        grpc_to(cluster) as channel,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        headers = bearer(await tenant_with_key(cluster, "acme"))
        await admin_of(cluster).set_limits("acme", {"max_choices": TENANTS_CHOICES})
        for model, n, num_tokens, has_logprobs, status, part in REQUESTS:
            text, num_top = " ".join(["word"] * num_tokens), NUM_TOP if has_logprobs else None
            body = {"model": model, "prompt": text, "n": n, "max_tokens": 1, "logprobs": num_top}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            message = answer.json()["error"]["message"]
            assert (answer.status_code, part in message) == (status, True), message
            sampling = pb.Sampling(max_tokens=1, logprobs=num_top)
            request = pb.GenerateRequest(model=model, text=text, num_choices=n, sampling=sampling)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub_on(channel).Generate(request, metadata=tuple(headers.items()))
            assert caught.value.details() == message
        assert cluster.gateway is not None
        admission = cluster.gateway.admission
        # A client may have its error before the gateway has ended the call.
        await until(
            lambda: (
                (admission.choices.num_taken, admission.prompt_tokens.num_taken, admission.body_bytes.num_taken)
                == (0, 0, 0)
            ),
            what="nothing is held",
        )
        body = {"model": MODEL, "prompt": "word", "n": TENANTS_CHOICES, "max_tokens": 1}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
