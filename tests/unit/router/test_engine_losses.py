"""Which request is blamed for a lost engine, and which one is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec import structs

from kvferry.engine.base import Parse, PromptImage, RequestId, Sampling
from kvferry.membership.base import MemberId
from kvferry.router.engine_losses import (
    BLAMED_S,
    MAX_BLAMED,
    MAX_BLAMELESS_LOSSES,
    MAX_LOSSES_IN_A_ROW,
    MAX_LOSSES_WITHOUT_PROGRESS,
    MAX_SHARED_LOSSES,
    MAX_VANISHED,
    UNRELATED_S,
    EngineLosses,
    RequestLosses,
    digest_of,
)
from kvferry.router.request import Prompt, Request

A, B = MemberId("a"), MemberId("b")


def lose(engines: EngineLosses, requests: Sequence[RequestLosses], *, num_tokens: int = 0, generation: int = 1) -> None:
    engine = (A, generation)
    for each in requests:
        engines.begin(engine, each)
    for each in requests:
        engines.lose(engine, each, num_tokens, 0.0)
        engines.end(engine, each)


def answered() -> RequestLosses:
    losses = RequestLosses()
    losses.has_answered = True
    return losses


def test_a_request_alone_is_refused_after_two_losses() -> None:
    for request in (RequestLosses(), answered()):
        engines = EngineLosses()
        lose(engines, [request])
        assert not request.are_too_many
        lose(engines, [request])
        assert request.are_too_many
        assert request.workers == [A, A]


def test_streams_are_not_blamed_beside_a_request_without_an_output() -> None:
    engines, poison, streams = EngineLosses(), RequestLosses(), [answered() for _ in range(8)]
    for _ in range(2):
        lose(engines, [*streams, poison])
    assert poison.are_too_many
    assert not any(stream.num_blamed or stream.are_too_many for stream in streams)
    for _ in range(20):
        lose(engines, [*streams, RequestLosses()])
    assert not any(stream.are_too_many for stream in streams)


def test_a_request_that_is_never_to_blame_loses_four_engines_at_most() -> None:
    engines, request = EngineLosses(), answered()
    for i in range(MAX_BLAMELESS_LOSSES):
        assert not request.are_too_many
        engines.begin((A, i), request)
        assert not engines.lose((A, i), request, i + 1, 0.0, is_blameless=True)
        engines.end((A, i), request)
    assert request.are_too_many
    assert (request.num_blamed, request.workers) == (0, [A] * MAX_BLAMELESS_LOSSES)


def test_losses_that_are_and_are_not_its_own_are_four_at_most() -> None:
    """Other gateways' requests without an output are on some of the engines that it ends, and not on others."""
    engines, request = EngineLosses(), answered()
    lose(engines, [request])
    assert request.num_blamed == 1
    for i in range(MAX_BLAMELESS_LOSSES - 1):
        assert not request.are_too_many
        engines.begin((B, i), request)
        engines.lose((B, i), request, i + 1, 0.0, is_blameless=True)
        engines.end((B, i), request)
    assert request.are_too_many


def test_streams_that_lose_engines_together_go_on_while_they_progress() -> None:
    engines, streams = EngineLosses(), [answered(), answered()]
    for i in range(MAX_SHARED_LOSSES - 1):
        lose(engines, streams, num_tokens=i + 1)
    assert not any(stream.are_too_many for stream in streams)
    lose(engines, streams, num_tokens=MAX_SHARED_LOSSES)
    assert all(stream.are_too_many for stream in streams)


def test_streams_that_lose_engines_together_without_a_token_between_end() -> None:
    engines, streams = EngineLosses(), [answered(), answered()]
    for _ in range(MAX_LOSSES_WITHOUT_PROGRESS - 1):
        lose(engines, streams, num_tokens=5)
    assert not any(stream.are_too_many for stream in streams)
    lose(engines, streams, num_tokens=5)
    assert all(stream.are_too_many for stream in streams)


def test_a_stream_that_was_blamed_once_may_lose_as_many_engines_with_others_as_any() -> None:
    engines, blamed, other = EngineLosses(), answered(), answered()
    lose(engines, [blamed])
    assert blamed.num_blamed == 1
    for _ in range(MAX_LOSSES_WITHOUT_PROGRESS - 1):
        lose(engines, [blamed, other])
    assert not blamed.are_too_many
    lose(engines, [blamed, other])
    assert blamed.are_too_many
    assert other.are_too_many


def test_a_request_that_came_after_the_loss_is_not_blamed() -> None:
    engines, first, later = EngineLosses(), RequestLosses(), RequestLosses()
    engine = (A, 1)
    engines.begin(engine, first)
    engines.lose(engine, first, 0, 0.0)
    engines.begin(engine, later)
    engines.lose(engine, later, 0, 0.0)
    assert (first.num_blamed, later.num_blamed) == (1, 0)
    engines.end(engine, first)
    engines.end(engine, later)
    assert not engines._in_flight
    assert not engines._suspects


async def test_one_suspect_is_on_trial_on_a_worker() -> None:
    engines, first, second = EngineLosses(), RequestLosses(), RequestLosses()
    lose(engines, [first, second])
    assert first.is_suspect
    assert second.is_suspect
    engines.begin_trial(b"first", first, None, B)
    assert engines.is_occupied(B, second)
    assert not engines.is_occupied(B, first)
    assert not engines.is_occupied(A, second)
    waiting = asyncio.create_task(engines.trial_end())
    await asyncio.sleep(0)
    assert not waiting.done()
    engines.end_trial(first)
    engines.end_trial(first)
    await waiting
    assert not engines.has_trials
    assert not engines.is_occupied(B, second)


PROMPT = Prompt([1, 2, 3], "acme")
REQUEST = Request(RequestId("r"), PROMPT, Sampling(max_tokens=5, seed=1))


def test_a_digest_is_of_tenant_prompt_parameters_adapter_and_images() -> None:
    same = structs.replace(REQUEST, request_id=RequestId("other"), sampling=structs.replace(REQUEST.sampling, seed=2))
    assert digest_of(same) == digest_of(REQUEST)
    others = [
        *(
            structs.replace(REQUEST, prompt=prompt)
            for prompt in (
                Prompt([1, 2, 3], "other"),
                Prompt([1, 2], "acme"),
                Prompt([1, 2, 3], "acme", "sql@00"),
                Prompt([1, 2, 3], "acme", "sql@11"),
                Prompt([1, 2, 3], "acme", images=(PromptImage("a", 0, 1, b"x"),)),
                Prompt([1, 2, 3], "acme", images=(PromptImage("b", 0, 1, b"x"),)),
            )
        ),
        structs.replace(REQUEST, sampling=structs.replace(REQUEST.sampling, structured_outputs="{}")),
        structs.replace(REQUEST, parse=Parse(b"x")),
    ]
    assert len({digest_of(each) for each in (REQUEST, *others)}) == 9
    without_features = Prompt([1, 2, 3], "acme", images=(PromptImage("b", 0, 1, b""),))
    assert digest_of(structs.replace(REQUEST, prompt=without_features)) == digest_of(others[5])


async def test_a_copy_of_a_blamed_request_is_a_suspect_and_waits_for_the_trial_of_another() -> None:
    engines, first, copy, other = EngineLosses(), RequestLosses(), RequestLosses(), RequestLosses()
    lose(engines, [first])
    engines.blame(b"digest", first, 0.0)
    assert engines.knows_blamed(1.0)
    engines.adopt_blame(b"digest", copy)
    engines.adopt_blame(b"another", other)
    assert (copy.is_suspect, other.is_suspect) == (True, False)
    engines.begin_trial(b"digest", first, None, B)
    assert engines.is_copy_on_trial(b"digest", copy)
    assert not engines.is_copy_on_trial(b"digest", first)
    engines.end_trial(first)
    assert not engines.is_copy_on_trial(b"digest", copy)
    lose(engines, [copy])
    assert copy.are_too_many, "the loss of its copy counts"


def test_blame_ends_with_an_answer_or_with_time_and_has_a_limit() -> None:
    engines, losses = EngineLosses(), RequestLosses()
    lose(engines, [losses])
    engines.blame(b"digest", losses, 0.0)
    engines.discharge(b"digest")
    assert not engines.knows_blamed(0.0)
    for i in range(MAX_BLAMED + 1):
        engines.blame(str(i).encode(), losses, 0.0)
    first, second = RequestLosses(), RequestLosses()
    engines.adopt_blame(b"0", first)
    engines.adopt_blame(b"1", second)
    assert (first.is_suspect, second.is_suspect) == (False, True)
    assert engines.knows_blamed(BLAMED_S - 1.0)
    assert not engines.knows_blamed(BLAMED_S)


def go_away(engines: EngineLosses, worker: str, request: RequestLosses, now_s: float, *, num_tokens: int = 0) -> None:
    engine = (MemberId(worker), 1)
    engines.begin(engine, request)
    engines.lose(engine, request, num_tokens, now_s, has_vanished=True)
    engines.end(engine, request)


def test_workers_that_go_away_are_blamed_on_a_request_while_all_others_stay() -> None:
    engines, poison = EngineLosses(), RequestLosses()
    go_away(engines, "a", poison, 0.0)
    go_away(engines, "b", poison, 1.0)
    assert poison.are_too_many


def test_workers_that_go_away_with_others_are_not_blamed_on_one_request() -> None:
    """As when a node pool is drained by force."""
    engines, unlucky = EngineLosses(), RequestLosses()
    go_away(engines, "a", unlucky, 0.0)
    go_away(engines, "b", RequestLosses(), 10.0)
    go_away(engines, "c", unlucky, 20.0)
    assert unlucky.is_suspect
    assert not unlucky.are_too_many
    # There is a limit all the same, and an engine that is known to have died counts fully.
    go_away(engines, "d", unlucky, 21.0)
    assert not unlucky.are_too_many
    go_away(engines, "e", unlucky, 22.0)
    assert unlucky.are_too_many
    assert len(unlucky.workers) == MAX_LOSSES_WITHOUT_PROGRESS


def test_workers_without_requests_go_away_too() -> None:
    engines, unlucky = EngineLosses(), RequestLosses()
    engines.note_vanished(MemberId("idle"), 0.0)
    go_away(engines, "a", unlucky, 1.0)
    go_away(engines, "b", unlucky, 2.0)
    assert not unlucky.are_too_many


@pytest.mark.parametrize("has_progress", [True, False])
def test_a_stream_survives_workers_that_go_away_with_others_while_it_progresses(has_progress: bool) -> None:
    engines, unlucky = EngineLosses(), answered()
    go_away(engines, "other", RequestLosses(), 0.0)
    lose(engines, [unlucky])
    for i in range(MAX_LOSSES_WITHOUT_PROGRESS - 1):
        assert not unlucky.are_too_many
        go_away(engines, f"w{i}", unlucky, 1.0, num_tokens=i + 1 if has_progress else 0)
    assert unlucky.are_too_many is not has_progress
    assert unlucky.num_blamed == 1


@pytest.mark.parametrize("has_progress", [True, False])
def test_a_request_is_not_forgiven_without_end(has_progress: bool) -> None:
    """As one that hangs each engine until its link is lost, and then lets it go on."""
    engines, request = EngineLosses(), answered()
    for i in range(MAX_LOSSES_IN_A_ROW):
        assert not request.are_too_many
        worker = f"w{i}"
        engine = (MemberId(worker), 1)
        engines.begin(engine, request)
        assert engines.lose(engine, request, i + 1 if has_progress else 0, float(i), has_vanished=True)
        engines.note_blamed(MemberId(worker), b"digest", request)
        engines.end(engine, request)
        engines.forgive(MemberId(worker))
        assert request.num_blamed == 0
    assert request.are_too_many is not has_progress


def test_an_engine_that_died_is_blamed_whatever_happens_elsewhere() -> None:
    engines, poison = EngineLosses(), RequestLosses()
    go_away(engines, "b", RequestLosses(), 0.0)
    for generation in (1, 2):
        lose(engines, [poison], generation=generation)
    assert poison.are_too_many


def test_others_are_forgotten_in_time() -> None:
    engines, poison = EngineLosses(), RequestLosses()
    go_away(engines, "b", RequestLosses(), 0.0)
    go_away(engines, "a", poison, UNRELATED_S)
    go_away(engines, "c", poison, UNRELATED_S + 1)
    assert poison.are_too_many


def test_workers_that_went_away_are_remembered_up_to_a_limit() -> None:
    engines = EngineLosses()
    for i in range(MAX_VANISHED + 5):
        go_away(engines, f"w{i}", RequestLosses(), float(i))
    assert len(engines._vanished) == MAX_VANISHED
