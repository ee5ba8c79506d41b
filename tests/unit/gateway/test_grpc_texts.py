from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.bodies import grpc_bodies
from kvferry.gateway.bodies.grpc_bodies import contents_of, read_generate, read_tokenize, text_of
from kvferry.inference.v1 import inference_pb2 as pb

TEXTS = st.text(st.sampled_from("aé漢😀\x00"), max_size=12)


@pytest.fixture(autouse=True, scope="module")
def _short_steps() -> object:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(grpc_bodies, "LONG_BYTES", 0)
        monkeypatch.setattr(grpc_bodies, "_STEP_BYTES", 5)
        yield


@st.composite
def conversations(draw: st.DrawFn) -> pb.Conversation:
    return pb.Conversation(
        messages=[
            pb.Message(role="user", content=draw(TEXTS), reasoning="r" * draw(st.integers(0, 200)))
            for _ in range(draw(st.integers(0, 3)))
        ],
        tool_choice=draw(st.sampled_from(["", "auto"])),
    )


@given(st.lists(TEXTS, min_size=1, max_size=3), st.sampled_from([pb.GenerateRequest, pb.TokenizeRequest]))
def test_the_text_as_protobuf_reads_it(texts: list[str], kind: type[pb.GenerateRequest | pb.TokenizeRequest]) -> None:
    """The last one counts where a message has several."""
    raw = b"".join(kind(model="m", text=text).SerializeToString() for text in texts)
    assert text_of(kind.FromString(raw), raw) == texts[-1]


@given(st.lists(conversations(), min_size=1, max_size=3), st.sampled_from([pb.GenerateRequest, pb.TokenizeRequest]))
def test_contents_as_protobuf_reads_them(
    parts: list[pb.Conversation], kind: type[pb.GenerateRequest | pb.TokenizeRequest]
) -> None:
    """Conversations of one message are merged."""
    raw = b"".join(kind(model="m", conversation=part).SerializeToString() for part in parts)
    message = kind.FromString(raw)
    assert contents_of(message, raw) == [each.content for each in message.conversation.messages]


def test_the_last_content_of_a_message_counts() -> None:
    parts = b"".join(pb.Message(role="user", content=content).SerializeToString() for content in ("first", "é"))
    conversation = b"\x0a" + bytes([len(parts)]) + parts
    raw = b"\x22" + bytes([len(conversation)]) + conversation
    message = pb.GenerateRequest.FromString(raw)
    assert [each.content for each in message.conversation.messages] == ["é"]
    assert contents_of(message, raw) == ["é"]


def test_bodies_have_them() -> None:
    raw = pb.GenerateRequest(model="m", text="é" * 100).SerializeToString()
    assert getattr(read_generate(raw)[1], "prompt") == "é" * 100  # noqa: B009
    request = pb.TokenizeRequest(model="m")
    request.conversation.messages.add(role="user", content="漢" * 100)
    assert getattr(read_tokenize(request.SerializeToString())[1], "messages")[0]["content"] == "漢" * 100  # noqa: B009
