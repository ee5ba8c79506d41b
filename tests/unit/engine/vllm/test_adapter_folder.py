"""What an adapter's folder has to prove before an engine may load it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import MAX_ADAPTERS, AdapterConfig, AdaptersConfig
from kvferry.engine.vllm import adapter_folder
from kvferry.engine.vllm.adapter_folder import CONFIG, WEIGHTS, stage
from kvferry.errors import ConfigError
from support.lora_adapters import adapter_config, write_tensors

MODEL_SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 40),
    "model.layers.0.mlp.experts.0.down_proj.weight": (16, 40),
    "model.embed_tokens.weight": (100, 16),
    "model.norm.weight": (16,),
}
Q, DOWN = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.mlp.down_proj"
PLAIN = {
    f"{Q}.lora_A.weight": (4, 16),
    f"{Q}.lora_B.weight": (24, 4),
    f"{DOWN}.lora_A.weight": (4, 40),
    f"{DOWN}.lora_B.weight": (16, 4),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (folder := tmp_path / "model").mkdir()
    write_tensors(folder / "model.safetensors", MODEL_SHAPES)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "padding": null}')
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (folder := tmp_path / "sql").mkdir()
    write_tensors(folder / WEIGHTS, PLAIN)
    (folder / CONFIG).write_text(json.dumps(adapter_config(4)))
    return folder


def staged(tmp_path: Path, *names: str, **values: Any) -> list[adapter_folder.StagedAdapter]:
    served = {name: AdapterConfig(path=str(tmp_path / name)) for name in names or ("sql",)}
    into = tmp_path / f"staged-{len(list(tmp_path.glob('staged-*')))}"
    return stage(AdaptersConfig(served=served, **values), tmp_path / "model", into)


def test_the_copy_is_what_was_checked(tmp_path: Path, model: Path, adapter: Path) -> None:
    (adapter / "README.md").write_text("not needed")
    (found,) = staged(tmp_path)
    assert sorted(file.name for file in found.folder.iterdir()) == [CONFIG, WEIGHTS]
    before = (found.folder / WEIGHTS).read_bytes()
    assert before == (adapter / WEIGHTS).read_bytes()
    write_tensors(adapter / WEIGHTS, PLAIN, fill=1)
    assert (found.folder / WEIGHTS).read_bytes() == before
    assert found.key == f"sql@{found.digest}"


def test_the_digest_is_of_both_files_and_nothing_else(tmp_path: Path, model: Path, adapter: Path) -> None:
    digests = [staged(tmp_path)[0].digest]
    (adapter / "notes.txt").write_text("other")
    os.utime(adapter / WEIGHTS, (1, 1))
    (tmp_path / "copy").mkdir()
    for file in (CONFIG, WEIGHTS):
        (tmp_path / "copy" / file).write_bytes((adapter / file).read_bytes())
    assert [each.digest for each in staged(tmp_path, "copy", "sql")] == digests * 2
    (adapter / CONFIG).write_text(json.dumps(adapter_config(4) | {"lora_alpha": 5}))
    digests.append(staged(tmp_path)[0].digest)
    write_tensors(adapter / WEIGHTS, PLAIN, fill=1)
    digests.append(staged(tmp_path)[0].digest)
    assert len(set(digests)) == 3
    assert all(len(digest) == 32 for digest in digests)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"r": 32}, r"its rank is 32, above adapters\.max_rank \(16\)"),
        ({"rank_pattern": {"q_proj": 17}}, "its rank is 17, above"),
        ({"r": 0}, "a rank is a whole number above 0"),
        ({"r": 4.0}, "a rank is a whole number"),
        ({"r": True}, "a rank is a whole number"),
        ({"r": "4" * 5000}, "a rank is a whole number"),
        ({"r": None}, "r is missing"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": "8"}, "lora_alpha is a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is a number of at most 1e"),
        ({"alpha_pattern": {"q_proj": -1e39}}, "lora_alpha is a number of at most 1e"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "lora_alpha is a number"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"bias": None}, "bias is 'None'"),
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"rank_pattern": {"(a*)*b": 4}}, "are accepted"),
        ({"rank_pattern": {"x" * 201: 4}}, "are accepted"),
        ({"rank_pattern": {f"a{i}": 4 for i in range(4097)}}, "at most 4096 modules"),
        ({"rank_pattern": [4]}, "no mapping"),
    ],
)
def test_configurations_that_are_no_plain_lora_are_refused(
    tmp_path: Path, model: Path, adapter: Path, values: dict[str, Any], words: str
) -> None:
    (adapter / CONFIG).write_text(json.dumps(adapter_config(4) | values))
    refused(tmp_path, adapter / CONFIG, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{Q}.lora_A.weight": (4, 15)}, r"q_proj\.lora_A has shape \(4, 15\); .* need \(4, 16\)"),
        ({f"{Q}.lora_A.weight": (4, 8)}, "q_proj.lora_A has shape"),
        ({f"{Q}.lora_A.weight": (3, 16)}, "q_proj.lora_A has shape"),
        ({f"{DOWN}.lora_B.weight": (40, 4)}, "down_proj.lora_B has shape"),
        ({f"{DOWN}.lora_B.weight": None}, "down_proj has lora_A alone"),
        ({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": (4, 16)}, "has lora_A alone"),
        (
            {
                "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": (4, 16),
                "base_model.model.model.layers.7.mlp.up_proj.lora_B.weight": (16, 4),
            },
            r"no weight model\.layers\.7\.mlp\.up_proj\.weight",
        ),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 16)}, "it has the tensor"),
        ({"base_model.model.lm_head.lora_A.weight": (4, 16)}, "it has the tensor"),
        ({"base_model.model.lm_head.weight": (4, 16)}, "it has the tensor"),
        ({f"{Q}.lora_C.weight": (4, 16)}, "it has the tensor"),
        ({"x" * 5000: (4, 16)}, "it has the tensor"),
        ({f"{Q}.lora_A.weight": (4, 4, 4)}, "not a matrix"),
        (dict.fromkeys(PLAIN), "it has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, model: Path, adapter: Path, changes: dict[str, Any], words: str
) -> None:
    tensors = {name: shape for name, shape in (PLAIN | changes).items() if shape is not None}
    write_tensors(adapter / WEIGHTS, tensors)
    refused(tmp_path, adapter / WEIGHTS, words)


def test_ranks_of_patterns_are_those_of_their_modules(tmp_path: Path, model: Path, adapter: Path) -> None:
    values = adapter_config(4) | {"rank_pattern": {"mlp.down_proj": 2}}
    (adapter / CONFIG).write_text(json.dumps(values))
    refused(tmp_path, adapter / WEIGHTS, "down_proj.lora_A has shape")
    write_tensors(adapter / WEIGHTS, PLAIN | {f"{DOWN}.lora_A.weight": (2, 40), f"{DOWN}.lora_B.weight": (16, 2)})
    assert staged(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "file", "words"),
    [
        (lambda file: file.unlink(), WEIGHTS, "the file is missing"),
        (lambda file: file.unlink(), CONFIG, "the file is missing"),
        (lambda file: file.write_bytes(b""), WEIGHTS, "no safetensors file"),
        (lambda file: file.write_bytes(b"\xff" * 64), WEIGHTS, "no safetensors file"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), WEIGHTS, "it was cut"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), WEIGHTS, "another file"),
        (lambda file: file.write_bytes((2).to_bytes(8, "little") + b"[]"), WEIGHTS, "no mapping"),
        (lambda file: file.write_bytes((4).to_bytes(8, "little") + b"{{{{"), WEIGHTS, "no JSON"),
        (lambda file: file.write_text("["), CONFIG, "it is no JSON"),
        (lambda file: file.write_text("[" * 100_000), CONFIG, "it is no JSON"),
        (lambda file: file.write_text("[]"), CONFIG, "no JSON object"),
        (lambda file: file.write_text(" " * (1 << 20) + "{}"), CONFIG, "over 1048576 bytes"),
        (lambda file: (file.unlink(), os.mkfifo(file)), WEIGHTS, "it is no file"),
        (lambda file: (file.unlink(), file.mkdir()), CONFIG, "directory|no file"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    tmp_path: Path, model: Path, adapter: Path, spoil: Callable[[Path], object], file: str, words: str
) -> None:
    spoil(adapter / file)
    refused(tmp_path, adapter / file, words)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4, 16], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [4, -16], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [4, 16.0], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [4, 16]},
        {"dtype": 7, "shape": [4, 16], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [0, 16], "data_offsets": [8, 0]},
        [],
    ],
)
def test_headers_that_describe_no_tensors_are_refused(tmp_path: Path, model: Path, adapter: Path, entry: Any) -> None:
    header = json.dumps({f"{Q}.lora_A.weight": entry}).encode()
    (adapter / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    refused(tmp_path, adapter / WEIGHTS, "its header describes")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: {name: entry | {"data_offsets": [0, 256]} for name, entry in header.items()}, "overlap"),
        (lambda header: header | {"__metadata__": {"a": 1}}, "__metadata__"),
        (lambda header: header | {"__metadata__": []}, "__metadata__"),
        (lambda header: dict(list(header.items())[1:]), "bytes of none"),
    ],
)
def test_headers_that_safetensors_refuses_are_refused(
    tmp_path: Path, model: Path, adapter: Path, change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    names = [f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"]
    header = {name: {"dtype": "F32", "shape": [4, 16], "data_offsets": [256 * i, 256 * i + 256]} for i, name in
              enumerate(names)}  # fmt: skip
    encoded = json.dumps(change(header)).encode()
    (adapter / WEIGHTS).write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(512))
    refused(tmp_path, adapter / WEIGHTS, words)


def test_what_safetensors_alone_refuses_is_refused(tmp_path: Path, model: Path, adapter: Path) -> None:
    entry = '{"dtype": "F32", "dtype": "F32", "shape": %s, "data_offsets": %s}'
    a, b = entry % ("[4, 16]", "[0, 256]"), entry % ("[24, 4]", "[256, 640]")
    encoded = f'{{"{Q}.lora_A.weight": {a}, "{Q}.lora_B.weight": {b}}}'.encode()
    (adapter / WEIGHTS).write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(640))
    refused(tmp_path, adapter / WEIGHTS, "safetensors cannot read it")


def test_types_that_are_no_floats_are_refused(tmp_path: Path, model: Path, adapter: Path) -> None:
    write_tensors(adapter / WEIGHTS, PLAIN, dtype="I32")
    refused(tmp_path, adapter / WEIGHTS, "has type I32")
    write_tensors(adapter / WEIGHTS, PLAIN, dtype="BF16")
    assert staged(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_refused_and_never_copied(tmp_path: Path, model: Path, adapter: Path, name: str) -> None:
    (adapter / name).write_bytes(b"code")
    (found,) = staged(tmp_path)
    assert not (found.folder / name).exists()
    (adapter / WEIGHTS).unlink()
    refused(tmp_path, adapter / name, "a pickle can run code")


def test_a_tokenizer_of_its_own_is_refused(tmp_path: Path, model: Path, adapter: Path) -> None:
    same = '{"padding": {"strategy": "x"}, "model": {"vocab": {"a": 0}}}'
    (adapter / "tokenizer.json").write_text(same)
    assert staged(tmp_path)
    for file, content in (("tokenizer.json", same.replace("0", "1")), ("added_tokens.json", '{"<x>": 7}')):
        (adapter / file).write_text(content)
        refused(tmp_path, adapter / file, "a tokenizer or tokens of their own are not served")
        (adapter / file).unlink()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("fill", [0xFF, 0x7F])
def test_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, model: Path, adapter: Path, dtype: str, fill: int
) -> None:
    """Of bytes 0xFF all are NaN; of 0x7F they are, or are as large as these types can hold."""
    write_tensors(adapter / WEIGHTS, PLAIN, dtype=dtype, fill=fill)
    refused(tmp_path, adapter / WEIGHTS, "has a value that is no number, or above 65504")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"lora_alpha": 4}, 1e6),
        ({"lora_alpha": -8}, 5e5),
        ({"lora_alpha": 4, "use_rslora": True}, 5e5),
        ({"lora_alpha": 0, "alpha_pattern": {"q_proj": 400}}, 1e4),
    ],
)
def test_weights_whose_product_makes_numbers_infinite_are_refused(
    tmp_path: Path, model: Path, adapter: Path, config: dict[str, Any], limit: float
) -> None:
    """Of `q_proj`, rows of A have a sum of 10 at most, and rows of B vary."""
    import torch
    from safetensors.torch import save_file

    (adapter / CONFIG).write_text(json.dumps(adapter_config(4) | config))
    a, b = torch.zeros(4, 16), torch.zeros(24, 4)
    a[1, :10] = -1.0
    for factor in (0.99, 1.01):
        b[3, :2] = factor * limit / 20
        save_file({f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}, adapter / WEIGHTS)
        if factor < 1:
            assert staged(tmp_path)
    refused(tmp_path, adapter / WEIGHTS, "q_proj may enlarge its input 1.01e[+]06 times")


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero"), Path.mkdir])
def test_a_tokenizer_that_is_no_file_is_refused(
    tmp_path: Path, model: Path, adapter: Path, make: Callable[[Path], object]
) -> None:
    make(adapter / "tokenizer.json")
    refused(tmp_path, adapter / "tokenizer.json", "it is no file|directory")


def test_a_large_tokenizer_is_refused(
    tmp_path: Path, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_folder, "_MAX_TOKENIZER_BYTES", 100)
    (adapter / "tokenizer.json").write_bytes(b"x" * 101)
    refused(tmp_path, adapter / "tokenizer.json", "more than 100 bytes")


def test_all_adapters_together_have_a_limit(tmp_path: Path, model: Path, adapter: Path) -> None:
    size = sum((adapter / file).stat().st_size for file in (CONFIG, WEIGHTS))
    assert staged(tmp_path, max_gib=size / (1 << 30))
    with pytest.raises(ConfigError, match=r"adapters\.max_gib"):
        staged(tmp_path, max_gib=(size - 1) / (1 << 30))


def test_as_many_adapters_as_may_be_configured_are_staged(tmp_path: Path, model: Path, adapter: Path) -> None:
    served = {f"a{i}": AdapterConfig(path=str(adapter)) for i in range(MAX_ADAPTERS)}
    found = stage(AdaptersConfig(served=served), model, tmp_path / "staged")
    assert len({each.key for each in found}) == MAX_ADAPTERS


def test_a_model_without_safetensors_has_no_adapters(tmp_path: Path, model: Path, adapter: Path) -> None:
    (model / "model.safetensors").rename(model / "model.bin")
    with pytest.raises(ConfigError, match="has no safetensors"):
        staged(tmp_path)


def test_hub_ids_are_fetched_without_other_files(
    tmp_path: Path, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def from_hub(name: str, report: object, **values: Any) -> Path:
        asked.update(values, name=name)
        return adapter

    monkeypatch.setattr(adapter_folder, "from_hub", from_hub)
    served = {"sql": AdapterConfig(path="owner/sql", revision="v1")}
    assert stage(AdaptersConfig(served=served), model, tmp_path / "staged")
    assert (asked["name"], asked["revision"], asked["key"]) == ("owner/sql", "v1", "adapters.served.sql.path")
    assert {CONFIG, WEIGHTS} < set(asked["only"])


def refused(tmp_path: Path, file: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        staged(tmp_path)
    assert caught.value.message.startswith(f"adapters.served.sql.path: {file}: ")
    assert len(caught.value.message) < 1000
