"""Exchange digests, and differences between their fields."""

from __future__ import annotations

from kvferry.pages.exchange import difference, exchange_digest, sorted_fields


def test_order_does_not_matter_and_every_value_does() -> None:
    fields = {"weights": "a", "max_model_len": 4096}
    digest = exchange_digest(sorted_fields(fields))
    assert len(bytes.fromhex(digest)) == 16
    assert exchange_digest(sorted_fields(dict(reversed(fields.items())))) == digest
    for changed in ({**fields, "weights": "b"}, {**fields, "rope": "x"}, {"weights": "a"}):
        assert exchange_digest(sorted_fields(changed)) != digest
    # Values that contain separators are no other fields.
    assert exchange_digest((("a", 'b","c'),)) != exchange_digest((("a", "b"), ("c", "")))


def test_a_difference_is_short() -> None:
    one = sorted_fields({f"field{i}": "a" * 1000 for i in range(9)})
    other = sorted_fields({f"field{i}": "b" * 1000 for i in range(9)})
    assert difference(one, one) == ""
    assert difference(one, other).endswith(", 6 more differ")
    assert len(difference(one, other)) < 1000
    assert difference((("a", "1"),), ()) == "a is 1 and not known"
