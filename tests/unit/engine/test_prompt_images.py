"""What engines take as images of a prompt."""

from __future__ import annotations

import pytest

from kvferry.engine.base import (
    MAX_DIGEST_CHARS,
    MAX_IMAGES,
    EngineRequest,
    PromptImage,
    RequestId,
    Sampling,
    validate_images,
)
from kvferry.errors import InvalidRequest


def request(*images: PromptImage, num_tokens: int = 20, is_transfer: bool = False) -> EngineRequest:
    transfer = {"remote": 1} if is_transfer else None
    return EngineRequest(
        RequestId("r"),
        [1] * num_tokens,
        Sampling(max_tokens=1),
        transfer_params=transfer,
        images=tuple(image.span for image in images),
        features=[image.features for image in images if not is_transfer],
    )


def test_images_in_order_are_taken_to_the_last_token_but_one() -> None:
    validate_images(request())
    validate_images(request(PromptImage("a", 0, 10, b"x"), PromptImage("a", 10, 9, b"x")))
    validate_images(request(PromptImage("a" * MAX_DIGEST_CHARS, 0, 1, b"x")))
    many = tuple(PromptImage("a", i, 1, b"x") for i in range(MAX_IMAGES))
    validate_images(request(*many, num_tokens=MAX_IMAGES + 1))


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ((PromptImage("", 0, 1, b"x"),), "digest of 0 characters"),
        ((PromptImage("a" * (MAX_DIGEST_CHARS + 1), 0, 1, b"x"),), f"1 to {MAX_DIGEST_CHARS} are allowed"),
        ((PromptImage("a", 0, 0, b"x"),), "tokens 0 to 0"),
        ((PromptImage("a", -1, 2, b"x"),), "tokens -1 to 1"),
        ((PromptImage("a", 15, 6, b"x"),), "of a prompt of 20"),
        ((PromptImage("a", 5, 5, b"x"), PromptImage("b", 9, 2, b"x")), "image 1 has tokens 9 to 11"),
        ((PromptImage("a", 15, 5, b"x"),), "text must follow"),
        ((PromptImage("a", 0, 1, b"x"), PromptImage("a", 1, 1, b"")), "image 1 has no features"),
        (tuple(PromptImage("a", i, 1, b"x") for i in range(MAX_IMAGES + 1)), f"the limit is {MAX_IMAGES}"),
    ],
)
def test_others_are_refused_by_name(images: tuple[PromptImage, ...], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        validate_images(request(*images))


def test_no_features_are_needed_where_the_pages_are_transferred() -> None:
    validate_images(request(PromptImage("a", 0, 10, b"xyz"), PromptImage("b", 12, 1, b"x"), is_transfer=True))
