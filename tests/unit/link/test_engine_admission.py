"""A suspect is computed when no other request of its engine is without an output."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.link.engine_admission import FirstOutputs


async def settle() -> None:
    """Let every task run until it waits for another one."""
    for _ in range(8):
        await asyncio.sleep(0)


def begin(outputs: FirstOutputs, owner: str, *, is_suspect: bool = False) -> asyncio.Task[None]:
    return asyncio.create_task(outputs.begin(owner, is_suspect=is_suspect))


async def test_others_begin_at_once_and_together() -> None:
    outputs = FirstOutputs()
    assert not outputs
    for owner in ("a", "b"):
        await outputs.begin(owner, is_suspect=False)
        assert owner in outputs
    outputs.end("a")
    outputs.end("a")
    assert "a" not in outputs
    assert outputs
    outputs.end("b")
    assert not outputs


async def test_a_suspect_begins_after_the_others_outputs() -> None:
    outputs = FirstOutputs()
    for owner in ("a", "b"):
        await outputs.begin(owner, is_suspect=False)
    suspect = begin(outputs, "suspect", is_suspect=True)
    await settle()
    outputs.end("a")
    await settle()
    assert not suspect.done()
    assert "suspect" not in outputs
    outputs.end("b")
    await suspect
    assert "suspect" in outputs


@pytest.mark.parametrize("has_begun", [False, True])
async def test_others_begin_after_the_suspect_s_output(has_begun: bool) -> None:
    outputs = FirstOutputs()
    if not has_begun:
        await outputs.begin("before", is_suspect=False)
    suspect = begin(outputs, "suspect", is_suspect=True)
    await settle()
    other = begin(outputs, "other")
    await settle()
    assert suspect.done() is has_begun
    outputs.end("before")
    await suspect
    await settle()
    assert not other.done()
    outputs.end("suspect")
    await other
    assert "other" in outputs


async def test_a_suspect_that_leaves_before_it_began_holds_up_nobody() -> None:
    outputs = FirstOutputs()
    await outputs.begin("before", is_suspect=False)
    suspect = begin(outputs, "suspect", is_suspect=True)
    await settle()
    other = begin(outputs, "other")
    await settle()
    suspect.cancel()
    await asyncio.gather(suspect, return_exceptions=True)
    outputs.end("suspect")
    await other
