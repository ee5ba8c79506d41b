"""The placement of a past request, from a local cluster's gateways."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import httpx

from kvferry.config import ClusterConfig, parse
from kvferry.errors import LocalError
from kvferry.gateway.http.asgi import EXPLAIN_PATH
from kvferry.membership.base import MemberKind
from kvferry.membership.etcd import EtcdMembership
from kvferry_local.gateway_access import KEY_VARIABLE, context_of, headers_of, url_of
from kvferry_local.run_folder import RunFolder
from kvferry_local.status import NotRunning

_TIMEOUT_S = 10.0


class NotAllowed(LocalError):
    pass


class UnknownRequest(LocalError):
    pass


def explain(folder: RunFolder, request_id: str) -> list[dict[str, Any]]:
    """Return a request's record, one entry per choice.

    `request_id` is the answer's id or `x-request-id`. Raises NotRunning, NotAllowed, UnknownRequest.
    """
    record = folder.record()
    if record is None:
        raise NotRunning("no cluster runs here; start one with `kvferry up` (or `make up`)")
    config = parse(record.config)
    addresses = asyncio.run(_gateways(config))
    context, headers = context_of(config.gateway), headers_of()
    for address in addresses:
        try:
            url = f"{url_of(config.gateway, address)}{EXPLAIN_PATH}{quote(request_id, safe='')}"
            answer = httpx.get(url, timeout=_TIMEOUT_S, trust_env=False, verify=context, headers=headers)
        except httpx.TransportError:
            continue
        if answer.status_code in (401, 403):
            message = answer.json()["error"]["message"]
            raise NotAllowed(f"the gateway refuses: {message} ({KEY_VARIABLE} can give a key)")
        if answer.status_code == 200:
            requests: list[dict[str, Any]] = answer.json()["requests"]
            return requests
    raise UnknownRequest(
        f"no gateway remembers the request {request_id!r}; each remembers its last few thousand (asked: "
        f"{', '.join(addresses) or 'none'})"
    )


async def _gateways(config: ClusterConfig) -> list[str]:
    membership = EtcdMembership(config.membership)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            members = await membership.members()
    except TimeoutError:
        raise UnknownRequest("etcd does not answer, and only it knows the gateways") from None
    finally:
        await membership.close()
    return [member.address for member in members if member.kind is MemberKind.GATEWAY]
