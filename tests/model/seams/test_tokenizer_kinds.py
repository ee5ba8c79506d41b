"""vLLM takes Mistral's tokenizer by the same names of files as `served_model.has_mistral_tokenizer`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.link.served_model import has_mistral_tokenizer

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "names",
    [
        ("tokenizer.json",),
        ("tokenizer.json", "tekken.json"),
        ("tokenizer.json", "consolidated.safetensors"),
        ("tokenizer.json", "tekken.json", "consolidated.safetensors"),
        ("tokenizer.model.v3", "consolidated-1.safetensors"),
        ("tokenizer.model", "consolidated.safetensors"),
        ("tekken.json", "original/consolidated.safetensors"),
        ("tekken.json", "consolidated.pth"),
    ],
)
def test_the_kind_of_a_folder_is_that_of_vllm(names: tuple[str, ...], tmp_path: Path) -> None:
    from vllm.tokenizers.registry import resolve_tokenizer_args

    for name in ("config.json", *names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
    kind, *_ = resolve_tokenizer_args(str(tmp_path))
    assert kind in ("hf", "mistral")
    assert has_mistral_tokenizer(tmp_path) is (kind == "mistral")
