"""link/identity.py: a gateway without weights works with workers of equal ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.link.identity import GatewayIdentity, Identity, ServedModel, why_incompatible
from kvferry.membership.base import MemberId


def of(weights: str) -> Identity:
    return Identity("c", ServedModel("m", "t", weights))


W1, W2, W3 = (MemberId(f"w{i}") for i in range(3))


def test_a_gateway_with_weights_keeps_to_them() -> None:
    own = GatewayIdentity(of("a"))
    own.linked(W1, of("a"))
    own.left(W1)
    assert own.current() == of("a")


def test_the_first_worker_decides_until_all_of_its_weights_have_left() -> None:
    own = GatewayIdentity(of(""))
    own.linked(W1, of(""))  # of a release that does not name them
    assert own.current() == of("")
    own.linked(W1, of("a"))
    assert "its weights revision is 'b', and here it is 'a'" in why_incompatible(own.current(), of("b"))
    own.linked(W2, of("a"))
    own.left(W1)
    assert why_incompatible(own.current(), of("b"))
    own.left(W2)
    own.left(W3)  # was never linked
    assert not why_incompatible(own.current(), of("b"))


@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.sampled_from([W1, W2, W3]), st.sampled_from(["", "a", "b"])), max_size=30
    )
)
def test_linked_workers_have_equal_weights(steps: list[tuple[bool, MemberId, str]]) -> None:
    own, linked = GatewayIdentity(of("")), dict[MemberId, str]()
    for is_there, worker_id, weights in steps:
        if not is_there:
            own.left(worker_id)
            linked.pop(worker_id, None)
        elif not why_incompatible(own.current(), of(weights)):
            own.linked(worker_id, of(weights))
            if weights:
                linked[worker_id] = weights
        own.check()
        assert len(set(linked.values())) <= 1
