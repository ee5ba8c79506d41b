"""The wire format carries every field both ways."""

from __future__ import annotations

import struct

import pytest

from kvferry.engine.base import (
    MAX_IMAGES,
    AnswerDelta,
    CachedTokens,
    Continued,
    EngineDurations,
    EngineOutput,
    EngineRequest,
    EngineStats,
    EngineTimes,
    FinishReason,
    Parse,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
    TokenLogprob,
    ToolCallDelta,
    validate_images,
)
from kvferry.errors import EngineDead, EngineError, InvalidRequest, KvferryError, Overloaded
from kvferry.link import codec
from kvferry.pages.keys import ImageSpan
from kvferry.tenancy.namespace import Namespace
from kvferry.wire.v1 import worker_pb2 as pb

FULL = Sampling(
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    seed=-3,
    presence_penalty=0.25,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    stop=("a", "b"),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    logprobs=0,
    logit_bias={5: -1.0},
    allowed_token_ids=(3, 4),
    bad_words=("x",),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    structured_outputs='{"json_object": true}',
)


def test_every_sampling_field_has_its_place_in_the_message() -> None:
    assert set(Sampling.__struct_fields__) == set(pb.Sampling.DESCRIPTOR.fields_by_name)


def test_every_field_of_the_full_example_differs_from_its_default() -> None:
    defaults = Sampling(max_tokens=1)
    assert [name for name in Sampling.__struct_fields__ if getattr(FULL, name) == getattr(defaults, name)] == []


@pytest.mark.parametrize("sampling", [FULL, Sampling(max_tokens=1)], ids=["full", "defaults"])
def test_sampling_survives_the_wire(sampling: Sampling) -> None:
    message = pb.Sampling.FromString(codec.sampling_to_wire(sampling).SerializeToString())
    assert codec.sampling_from_wire(message) == sampling


@pytest.mark.parametrize(
    ("keep", "transfer"), [(True, None), (False, {"remote_block_ids": [[1, 2]], "nested": {"a": None}}), (False, None)]
)
def test_a_request_survives_the_wire(keep: bool, transfer: dict[str, object] | None) -> None:
    images = (ImageSpan("a" * 64, 0, 1), ImageSpan("b", 1, 2))
    features = [b"\x00features", b"more"] if transfer is None else []
    request = EngineRequest(
        *(RequestId("r-1"), [5, 6, 7], FULL, keep, transfer, "salt"), adapter="sql@00", images=images, features=features
    )
    message = pb.Downward.FromString(codec.submit_to_wire(9, request).SerializeToString())
    assert message.submit.number == 9
    assert codec.submit_from_wire(message.submit) == request


def test_of_too_many_images_one_more_than_allowed_is_read() -> None:
    images = tuple(ImageSpan("a", i, 1) for i in range(2 * MAX_IMAGES))
    request = EngineRequest(RequestId("r"), [1] * (2 * MAX_IMAGES + 1), FULL, images=images)
    read = codec.submit_from_wire(codec.submit_to_wire(1, request).submit)
    assert read.images == images[: MAX_IMAGES + 1]
    assert read.features == []
    with pytest.raises(InvalidRequest, match=f"{MAX_IMAGES + 1} images; the limit is {MAX_IMAGES}"):
        validate_images(read)


def test_features_stay_with_their_images() -> None:
    images = (ImageSpan("a", 0, 1), ImageSpan("b", 1, 1))
    message = codec.submit_to_wire(1, EngineRequest(RequestId("r"), [1] * 3, FULL, images=images)).submit
    message.images[1].features = b"of b"
    read = codec.submit_from_wire(message)
    assert read.features == [b"", b"of b"]
    with pytest.raises(InvalidRequest, match="image 0 has no features"):
        validate_images(read)


@pytest.mark.parametrize(
    "hints",
    [
        TierHints(),
        TierHints(Namespace("acme", 3), {"volume-a": 7, "volume-b": 0}),
        TierHints(wanted_s=0.0),
        TierHints(Namespace("acme", 3), wanted_s=86400.0),
    ],
    ids=["default", "full", "end", "wanted"],
)
def test_what_is_known_of_tiers_survives_the_wire(hints: TierHints) -> None:
    request = EngineRequest(RequestId("r-1"), [5, 6, 7], FULL, tier=hints)
    message = pb.Downward.FromString(codec.submit_to_wire(9, request).SerializeToString())
    assert codec.submit_from_wire(message.submit) == request


def test_a_tenant_that_is_none_cannot_be_read() -> None:
    message = codec.submit_to_wire(9, EngineRequest(RequestId("r-1"), [5], FULL, tier=TierHints()))
    message.submit.tier.tenant = "../acme"
    with pytest.raises(ValueError, match="tenant"):
        codec.submit_from_wire(message.submit)


def test_a_request_has_its_tenants_name_and_none_of_its_terms_on_the_wire() -> None:
    names = {field.name for field in pb.Tier.DESCRIPTOR.fields}
    assert names == {"tenant", "epoch", "volumes", "no_load", "wanted_s"}
    assert {field.name for field in pb.Turn.DESCRIPTOR.fields} == {"tenant", "share", "missing_tokens"}


def test_terms_that_an_older_gateway_sends_with_a_request_are_ignored() -> None:
    request = EngineRequest(RequestId("r-1"), [5], FULL, tier=TierHints(Namespace("acme", 3), wanted_s=1.0))
    message = codec.submit_to_wire(9, request)
    terms = b"\x09" + struct.pack("<d", 0.5) + b"\x11" + struct.pack("<d", 0.75)  # floor and cap
    of_tiers = b"".join(bytes([number << 3 | 2, len(terms)]) + terms for number in (5, 6))  # cpu and device
    message.submit.tier.MergeFromString(of_tiers)
    assert of_tiers in message.submit.tier.SerializeToString()
    assert codec.submit_from_wire(pb.Downward.FromString(message.SerializeToString()).submit) == request


@pytest.mark.parametrize("wanted_s", [-1.0, 86401.0, float("nan"), float("inf")])
def test_a_time_that_no_client_may_name_cannot_be_read(wanted_s: float) -> None:
    message = codec.submit_to_wire(9, EngineRequest(RequestId("r-1"), [5], FULL, tier=TierHints(wanted_s=1.0)))
    message.submit.tier.wanted_s = wanted_s
    with pytest.raises(ValueError, match="wanted for"):
        codec.submit_from_wire(message.submit)


def test_transfer_parameters_that_are_nested_too_deeply_cannot_be_read() -> None:
    message = codec.submit_to_wire(9, EngineRequest(RequestId("r-1"), [5], FULL))
    message.submit.transfer_params = b"[" * 200_000
    with pytest.raises(ValueError, match="nested"):
        codec.submit_from_wire(message.submit)


def test_what_a_parser_needs_and_where_it_goes_on_survive_the_wire() -> None:
    request = EngineRequest(
        RequestId("r-1"), [5, 6, 7], FULL, continued=Continued(2, 2, (1, 1)), parse=Parse(b'{"a":1}')
    )
    message = pb.Downward.FromString(codec.submit_to_wire(9, request).SerializeToString())
    assert codec.submit_from_wire(message.submit) == request
    message.submit.parse.num_tokens_before = 3
    with pytest.raises(ValueError, match="an earlier release"):
        codec.submit_from_wire(message.submit)


DELTAS = [
    AnswerDelta("x"),
    AnswerDelta(reasoning='"ü\n'),
    AnswerDelta(tool_calls=(ToolCallDelta(0, "call-1", "f", '{"a'), ToolCallDelta(1, arguments="}"))),
    AnswerDelta("a", "b", (ToolCallDelta(2, "i", "n"),)),
]


def test_deltas_travel_with_the_outputs_they_belong_to() -> None:
    step = pb.Step()
    codec.append_output(step, 1, EngineOutput([7], "plain"))
    for i, delta in enumerate(DELTAS):
        codec.append_output(step, 2 + i, EngineOutput([8, 9], "raw", delta=delta))
    # Held back by the parser until the end: there is no text left to go with it.
    codec.append_output(step, 9, EngineOutput([], "", delta=DELTAS[0], finish_reason=FinishReason.STOP))
    *outputs, (_, end) = codec.outputs_of(pb.Step.FromString(step.SerializeToString()))
    assert [o.delta for _, o in outputs if isinstance(o, EngineOutput)] == [None, *DELTAS, DELTAS[0]]
    assert [o.text for _, o in outputs if isinstance(o, EngineOutput)] == ["plain", *["raw"] * len(DELTAS), ""]
    assert isinstance(end, EngineOutput)
    assert (end.finish_reason, end.delta) == (FinishReason.STOP, None)


def test_sources_travel_with_the_first_output_of_their_prompt() -> None:
    step, sources = pb.Step(), PromptSources(1, 2, 3)
    codec.append_output(step, 1, EngineOutput([7], "plain"))
    codec.append_output(step, 2, EngineOutput([8], "first", sources=sources))
    codec.append_output(step, 3, EngineOutput([9], "last", finish_reason=FinishReason.STOP, sources=sources))
    assert codec.is_text_only(step), "which goes the fast way"
    read = pb.Step.FromString(step.SerializeToString())
    assert {entry.number: codec.sources_from_wire(entry.sources) for entry in read.sources} == {2: sources}


@pytest.mark.parametrize("num_tokens", [[], [1, 1, 1], [2, 0, 1], [1, 3], [0]])
def test_text_alone_is_read_as_the_outputs_that_it_is(num_tokens: list[int]) -> None:
    step = pb.Step()
    for number, count in enumerate(num_tokens):
        codec.append_output(step, number, EngineOutput(list(range(count)), f"text {number}"))
    codec.append_output(step, 0, EngineOutput([], "", finish_reason=FinishReason.STOP))
    read = pb.Step.FromString(step.SerializeToString())
    assert codec.is_text_only(read)
    texts = [(number, list(token_ids), text) for number, token_ids, text in codec.texts_of(read)]
    outputs = [(number, output) for number, output in codec.outputs_of(read) if isinstance(output, EngineOutput)]
    assert texts == [(number, output.token_ids, output.text) for number, output in outputs[:-1]]
    assert outputs[-1:] == list(codec.ends_of(read))


def test_text_alone_it_is_not_with_logprobs_or_deltas() -> None:
    for output in (
        EngineOutput([7], "a", logprobs=[[TokenLogprob(7, "a", -1.0)]]),
        EngineOutput([7], "", delta=DELTAS[0]),
    ):
        step = pb.Step()
        codec.append_output(step, 1, output)
        assert not codec.is_text_only(step)


def test_a_plain_output_costs_no_byte_for_parsers() -> None:
    step = pb.Step()
    codec.append_output(step, 1, EngineOutput([7], "plain"))
    assert {field.name for field, _ in step.ListFields()} == {"numbers", "num_tokens", "token_ids", "texts"}


def test_half_a_character_in_a_delta_does_not_lose_the_step() -> None:
    step = pb.Step()
    torn = AnswerDelta("a\ud83d", "\udc00b", (ToolCallDelta(0, "i", "n\ud83d", "\ud83d"),))
    codec.append_output(step, 1, EngineOutput([7], "", delta=torn))
    ((_, output),) = codec.outputs_of(pb.Step.FromString(step.SerializeToString()))
    assert isinstance(output, EngineOutput)
    assert output.delta == AnswerDelta("a\ufffd", "\ufffdb", (ToolCallDelta(0, "i", "n\ufffd", "\ufffd"),))


def test_the_size_of_a_delta_is_not_underrated() -> None:
    for delta in DELTAS:
        output = EngineOutput([8], "raw", delta=delta)
        step = pb.Step()
        codec.append_output(step, 1, output)
        assert codec.approximate_bytes(output) >= step.ByteSize()


def test_a_step_carries_many_requests_in_columns_and_their_ends() -> None:
    step = pb.Step()
    first = EngineOutput(token_ids=[1, 2], text="ab")
    second = EngineOutput(
        token_ids=[3],
        text="c",
        logprobs=[[TokenLogprob(3, "c", -0.5), TokenLogprob(4, "d", -1.5)]],
        finish_reason=FinishReason.STOP,
        stop_reason="c",
        sources=PromptSources(1, 2, 3),
        cached=CachedTokens(4, 5, 6, 7),
        transfer_params={"k": [1]},
    )
    codec.append_output(step, 10, first)
    codec.append_output(step, 11, second)
    codec.append_output(
        step, 10, EngineOutput(token_ids=[5], text="", finish_reason=FinishReason.LENGTH, stop_reason=None)
    )
    codec.append_failure(step, 12, EngineDead("gone"))
    outputs = list(codec.outputs_of(pb.Step.FromString(step.SerializeToString())))

    assert [(number, list(o.token_ids), o.text) for number, o in outputs[:3] if isinstance(o, EngineOutput)] == [
        (10, [1, 2], "ab"),
        (11, [3], "c"),
        (10, [5], ""),
    ]
    assert isinstance(outputs[1][1], EngineOutput)
    assert outputs[1][1].logprobs == second.logprobs
    ends = dict(outputs[3:])
    stopped, ended, failed = ends[11], ends[10], ends[12]
    assert isinstance(stopped, EngineOutput)
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, "c")
    assert (stopped.sources, stopped.transfer_params) == (PromptSources(1, 2, 3), {"k": [1]})
    assert stopped.cached == CachedTokens(4, 5, 6, 7)
    assert isinstance(ended, EngineOutput)
    assert ended.finish_reason is FinishReason.LENGTH
    assert isinstance(failed, EngineDead)
    assert failed.message == "gone"


def test_a_stop_token_id_of_zero_is_not_lost() -> None:
    step = pb.Step()
    codec.append_output(step, 1, EngineOutput(token_ids=[0], text="", finish_reason=FinishReason.STOP, stop_reason=0))
    _, (_, end) = list(codec.outputs_of(step))
    assert isinstance(end, EngineOutput)
    assert end.stop_reason == 0


@pytest.mark.parametrize("error", [InvalidRequest("bad"), Overloaded("full"), EngineDead("dead"), EngineError("broke")])
def test_an_error_stays_itself_across_the_wire(error: KvferryError) -> None:
    step = pb.Step()
    codec.append_failure(step, 1, error)
    ((_, received),) = list(codec.outputs_of(step))
    assert type(received) is type(error)
    assert isinstance(received, KvferryError)
    assert received.message == error.message


TIMES = EngineTimes(10.0, 12.0, 12.5, 14.5, (10.25, 11.75), (11.0, 11.125), 0.5, 0.25)


def sent(output: EngineOutput) -> EngineOutput:
    """The end of a request as the gateway gets it."""
    step = pb.Step()
    codec.append_output(step, 1, output)
    ((_, end),) = codec.outputs_of(pb.Step.FromString(step.SerializeToString()))
    assert isinstance(end, EngineOutput)
    return end


def test_durations_are_the_times_of_one_engine_without_its_clock() -> None:
    end = sent(EngineOutput((), "", finish_reason=FinishReason.STOP, times=TIMES))
    assert end.times is None
    assert end.durations == EngineDurations(250.0, 500.0, 1500.0, 125.0, 0.5, 0.25)
    partly = sent(EngineOutput((), "", finish_reason=FinishReason.STOP, times=EngineTimes(10.0, 12.0, 12.5, 14.5)))
    assert partly.durations == EngineDurations(queue_ms=2000.0, prefill_ms=500.0)
    assert sent(EngineOutput((), "", finish_reason=FinishReason.STOP)).durations is None


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_durations_that_no_clock_gives_are_unknown(value: float) -> None:
    names = EngineDurations.__struct_fields__
    finished = pb.Finished(reason=pb.FINISH_REASON_STOP, durations=pb.Durations(**dict.fromkeys(names, value)))
    ((_, end),) = codec.ends_of(pb.Step(finished=[finished]))
    assert isinstance(end, EngineOutput)
    assert end.durations == EngineDurations()


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_is_above_0_and_at_most_1(share: float) -> None:
    durations = pb.Durations(prefill_share=share, kv_transfer_share=1.0)
    ((_, end),) = codec.ends_of(pb.Step(finished=[pb.Finished(reason=pb.FINISH_REASON_STOP, durations=durations)]))
    assert isinstance(end, EngineOutput)
    assert end.durations == EngineDurations(kv_transfer_share=1.0)


@pytest.mark.parametrize("queued", [None, 0, 15])
def test_load_survives_the_wire(queued: int | None) -> None:
    cached, adapters = CachedTokens(8, 9, 10, 11), frozenset({"sql@00", "poems@11"})
    load = EngineStats(1, 2, 1, 3, 4, PromptSources(5, 6, 7), cached, 12, 13, 14, queued, loaded_adapters=adapters)
    message = codec.stats_to_wire(load, draining=True)
    assert message.draining
    assert codec.stats_from_wire(pb.Load.FromString(message.SerializeToString())) == load


def test_half_a_character_does_not_spoil_the_step_it_is_in() -> None:
    """A lone surrogate has no UTF-8. Refused half-way, it would leave the columns of everybody's step unequal."""
    step = pb.Step()
    codec.append_output(step, 1, EngineOutput((5,), "a"))
    half = [[TokenLogprob(6, "\ud83d", -1.0)]]
    codec.append_output(
        step, 2, EngineOutput((6,), "\ud83d", half, finish_reason=FinishReason.STOP, stop_reason="\udc00")
    )
    codec.append_output(step, 3, EngineOutput((7,), "\ud83d\ude00"))
    codec.append_failure(step, 4, EngineError("\ud83d"))
    items = list(codec.outputs_of(pb.Step.FromString(step.SerializeToString())))
    assert [number for number, _ in items] == [1, 2, 3, 2, 4]
    outputs = [item for _, item in items if isinstance(item, EngineOutput)]
    assert [output.text for output in outputs] == ["a", "\ufffd", "\U0001f600", ""]
    assert outputs[-1].stop_reason == "\ufffd"


def test_an_estimate_of_an_outputs_size_is_never_far_below_it() -> None:
    outputs = [
        EngineOutput((1,), "x"),
        EngineOutput(range(2**31 - 200, 2**31 - 100), "漢字😀" * 100),
        EngineOutput((1,) * 10, "x" * 10, [[TokenLogprob(2**31 - 1, "😀😀", -0.1)] * 21] * 10),
        EngineOutput((), "", finish_reason=FinishReason.STOP),
        EngineOutput((), "", finish_reason=FinishReason.STOP, times=TIMES, sources=PromptSources(9**9, 9**9, 9**9)),
    ]
    for output in outputs:
        step = pb.Step()
        codec.append_output(step, 2**40, output)
        assert codec.approximate_bytes(output) > step.ByteSize() * 0.7


def test_when_to_come_back_crosses_the_wire() -> None:
    step = pb.Step()
    codec.append_failure(step, 1, Overloaded("full", retry_after_s=17))
    ((_, error),) = codec.outputs_of(step)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 17
