"""Models of a few layers with random weights for real engines on a CPU: each kind of attention, and one with images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry import model_folder

_COMMON: dict[str, Any] = {
    "vocab_size": 49152,  # the default model's tokenizer
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large, so that every token of the prompt changes the answer.
    "initializer_range": 0.4,
}
_LAYERS = "model.layers."
_ENDS = 4  # layers of the default model that the short one keeps at either end
# A context that YaRN makes longer; vLLM's own base of rotations is another one.
_SHORT: dict[str, Any] = {
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _configured(name: str, **values: Any) -> Callable[[], Any]:
    def configure() -> Any:
        import transformers

        return getattr(transformers, name)(**(_COMMON | values))

    return configure


# Models whose pages survive a transfer: tests/model/test_models.py.
TESTED: Mapping[str, Callable[[], Any]] = {
    "gemma3": _configured(
        "Gemma3TextConfig",
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
    "mistral": _configured("MistralConfig", head_dim=32, sliding_window=64),
    "llama": _configured("LlamaConfig", head_dim=32),
    "qwen2": _configured("Qwen2Config", hidden_size=128),
    "qwen3": _configured("Qwen3Config", head_dim=32),
    "granite": _configured("GraniteConfig", hidden_size=128),
    "olmo2": _configured("Olmo2Config", hidden_size=128),
    "mixtral": _configured("MixtralConfig", head_dim=32, num_local_experts=4),
    "qwen3-moe": _configured("Qwen3MoeConfig", head_dim=32, **_EXPERTS),
    "phi3-longrope": _configured(
        "Phi3Config",
        hidden_size=128,
        original_max_position_embeddings=512,
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(16)],
            "long_factor": [2.0 + i for i in range(16)],
        },
    ),
    "qwen2-yarn": _configured("Qwen2Config", hidden_size=128, **_SHORT),
    "qwen3-yarn": _configured("Qwen3Config", head_dim=32, **_SHORT),
    "qwen3-moe-yarn": _configured("Qwen3MoeConfig", head_dim=32, **_EXPERTS, **_SHORT),
    "qwen3-int8": _configured("Qwen3Config", head_dim=32, hidden_size=128, intermediate_size=256),
    "qwen3-fp8": _configured("Qwen3Config", head_dim=32, hidden_size=128, intermediate_size=256),
}
# Models for tests of drafts and tiers; the first two have pages of other sizes than those of any model above.
FURTHER: Mapping[str, Callable[[], Any]] = {
    "small-llama": _configured("LlamaConfig", head_dim=64, num_key_value_heads=1, num_hidden_layers=2),
    "wide-llama": _configured("LlamaConfig", head_dim=32, hidden_size=320),
    # Its answers repeat themselves: a third of the drafts by n-grams are accepted.
    "repeating-llama": _configured("LlamaConfig", head_dim=32, initializer_range=0.1),
    # 16 KiB per token: pages as large as those of real models, and little to compute.
    "large-pages": _configured(
        "LlamaConfig", head_dim=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8
    ),
}
_SEEN = [1, 2, 3]  # layers
# Models of TESTED with quantized weights: largest value, torch's and compressed-tensors' type, and its format.
_QUANTIZED: Mapping[str, tuple[float, str, str, str]] = {
    "qwen3-int8": (127.0, "int8", "int", "int-quantized"),
    "qwen3-fp8": (448.0, "float8_e4m3fn", "float", "float-quantized"),
}
# Models of TESTED with other settings of both engines, and of the decode engine.
CONFIGURED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-tp2": ("qwen3", {"tensor_parallel_size": 2}),
    "qwen3-streamer": (
        "qwen3",
        {"args": {"load_format": "safetensors"}, "decode": {"args": {"load_format": "runai_streamer"}}},
    ),
}
# Keys of `model` for models of TESTED.
YARN: Mapping[str, Any] = {"rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 512}}
OVERRIDDEN: Mapping[str, Mapping[str, Any]] = {
    name: {"hf_overrides": YARN} for name in ("qwen2-yarn", "qwen3-yarn", "qwen3-moe-yarn")
}
_IMAGE_SIZE, _PATCH_SIZE, _SCALE = 64, 8, 2  # of one tile, in pixels; `_SCALE` patches each way become one token
IMAGE_TOKENS_PER_TILE = (_IMAGE_SIZE // _PATCH_SIZE // _SCALE) ** 2
_TILES = 2  # each way, that a large image is cut into, beside one of the whole image
_VISION_SCALE = 0.2  # of weights of the vision model and the connector: as `initializer_range`, for the same reason
IMAGE_TOKEN = "<image>"
# After the default model's tokens.
_IMAGE_TOKENS = (
    IMAGE_TOKEN,
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, _TILES + 1) for column in range(1, _TILES + 1)),
)
_FIRST_IMAGE_TOKEN_ID = _COMMON["vocab_size"]
_IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE_TOKEN + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _idefics3() -> Any:
    from transformers import Idefics3Config, LlamaConfig

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": _IMAGE_SIZE,
        "patch_size": _PATCH_SIZE,
    }
    return Idefics3Config(
        vision_config=vision,
        text_config=LlamaConfig(**(_COMMON | {"head_dim": 32, "vocab_size": _FIRST_IMAGE_TOKEN_ID + 64})),
        image_token_id=_FIRST_IMAGE_TOKEN_ID,
        scale_factor=_SCALE,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


# Models with images, tested by tests/model/test_images.py.
IMAGE_MODELS: Mapping[str, Callable[[], Any]] = {"idefics3": _idefics3}
# Kinds whose pages are not kept in tiers.
OTHERS: Mapping[str, Callable[[], Any]] = {
    "deepseek-v2": _configured(
        "DeepseekV2Config",
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "llama4": _configured(
        "Llama4TextConfig",
        head_dim=32,
        intermediate_size_mlp=128,
        num_local_experts=4,
        attention_chunk_size=128,
        no_rope_layers=[1, 1, 1, 0],
    ),
    "gpt-oss": _configured(
        "GptOssConfig",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "falcon-h1": _configured(
        "FalconH1Config",
        head_dim=32,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
    ),
    "gemma3n": _configured(
        "Gemma3nTextConfig",
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=49152,
        altup_num_inputs=4,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
        tie_word_embeddings=True,
    ),
    "bloom": _configured("BloomConfig", hidden_size=128, n_layer=4, n_head=4, tie_word_embeddings=True),
    "opt": _configured("OPTConfig", hidden_size=128, ffn_dim=256, word_embed_proj_dim=128),
    "qwen2-dual-chunk": _configured(
        "Qwen2Config",
        dual_chunk_attention_config={"chunk_size": 256, "local_size": 64, "original_max_position_embeddings": 2048},
    ),
    "cohere2": _configured(
        "Cohere2Config",
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        tie_word_embeddings=True,
    ),
    "mamba2": _configured(
        "Mamba2Config", head_dim=32, num_heads=4, n_groups=1, state_size=16, expand=2, layer_norm_epsilon=1e-5
    ),
    "qwen3-next": _configured(
        "Qwen3NextConfig",
        head_dim=32,
        shared_expert_intermediate_size=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        **_EXPERTS,
    ),
    "qwen3-gptq": _configured(
        "Qwen3Config",
        head_dim=32,
        dtype="float16",
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    ),
}


def write_config(name: str, folder: Path) -> Path:
    """Write a model's configuration, without weights."""
    config = (TESTED | OTHERS)[name]()
    config.architectures = [f"{type(config).__name__.removesuffix('Config').removesuffix('Text')}ForCausalLM"]
    if name in _QUANTIZED:
        config.quantization_config = _quantization_config(name)
    config.save_pretrained(folder)
    return folder


def make_model(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Write a model with random weights, always the same, and the default model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = (TESTED | FURTHER | OTHERS)[name]()
    AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer = model_folder.resolve(model_folder.DEFAULT_NAME)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    if name in _QUANTIZED:
        _quantize(name, folder)
    return folder


def make_short_model(folder: Path) -> Path:
    """Write the default model without the layers between its first and its last four.

    An answer has other tokens than that of the whole model, hardly one of them twice, since each token of the prompt
    changes it. A step reads 230 MB of weights instead of 540.
    """
    from safetensors.torch import load_file, save_file

    whole = model_folder.resolve(model_folder.DEFAULT_NAME)
    config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    num_layers = config["num_hidden_layers"]
    new_number = {old: new for new, old in enumerate((*range(_ENDS), *range(num_layers - _ENDS, num_layers)))}
    weights = {}
    for key, each in load_file(whole / "model.safetensors").items():
        if not key.startswith(_LAYERS):
            weights[key] = each
            continue
        number, _, name = key.removeprefix(_LAYERS).partition(".")
        if int(number) in new_number:
            weights[f"{_LAYERS}{new_number[int(number)]}.{name}"] = each
    shutil.copytree(whole, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(new_number)}), encoding="utf-8")
    return folder


def make_draft_model(target: Path, folder: Path, *, noise: float) -> Path:
    """Write a draft model: the target's weights with noise of `noise` times their deviation, always the same."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder, dirs_exist_ok=True)
    random = torch.Generator().manual_seed(7)
    weights = load_file(target / "model.safetensors")
    for key, each in weights.items():
        if each.dim() > 1:
            weights[key] = each + torch.randn(each.shape, generator=random) * each.std() * noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_eagle_head(target: Path, folder: Path, method: str, answers: Sequence[tuple[Sequence[int], int]]) -> Path:
    """Write an EAGLE head of a Llama whose drafts fit answers: all tokens of each, and how many are its prompt's."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    inputs, outputs = [], []
    with torch.no_grad():
        for tokens, first in answers:
            seen = model.model(torch.tensor([tokens]), output_hidden_states=True)
            last, embedded = seen.last_hidden_state[0], model.model.embed_tokens(torch.tensor(tokens))
            # At the place of a token, the one after the next is drafted; EAGLE-3 sees what three layers begin with.
            before = [embedded[1:], last[:-1]] if method == "eagle" else [seen.hidden_states[i][0, :-1] for i in _SEEN]
            inputs.append(torch.cat(before, dim=-1)[first - 1 : -1])
            outputs.append(last[first:-1])
        fitted = torch.linalg.lstsq(torch.cat(inputs).double(), torch.cat(outputs).double()).solution.T.float()
    weights = {
        key.removeprefix("model."): each
        for key, each in load_file(target / "model.safetensors").items()
        if key.startswith("model.layers.0.") and ("input_layernorm" not in key or method == "eagle3")
    }
    weights["fc.weight"] = fitted.contiguous()
    weights["layers.0.mlp.down_proj.weight"] *= 0.0
    weights["layers.0.self_attn.o_proj.weight"] *= 0.001  # so that the head's pages change some drafts
    config["num_hidden_layers"] = 1
    if method == "eagle3":
        known = torch.tensor(sorted({token for tokens, first in answers for token in tokens[first:]}))
        config |= {"draft_vocab_size": len(known), "eagle_aux_hidden_state_layer_ids": _SEEN}
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        weights |= {name: torch.ones(config["hidden_size"]) for name in ("norm.weight", "layers.0.hidden_norm.weight")}
        for name in ("q", "k", "v"):
            half = weights[f"layers.0.self_attn.{name}_proj.weight"]
            weights[f"layers.0.self_attn.{name}_proj.weight"] = torch.cat([half, half.flip(0)], dim=1)
        weights["lm_head.weight"] = model.lm_head.weight.detach()[known]
        weights["d2t"] = known - torch.arange(len(known))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_image_model(name: str, folder: Path) -> Path:
    """Write an image model with random weights, always the same, its processor, and the default model's tokenizer."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, Idefics3Processor

    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(IMAGE_MODELS[name]()).to(torch.float32)
    with torch.no_grad():
        for key, weights in model.named_parameters():
            if ("vision_model" in key or "connector" in key) and weights.dim() > 1:
                weights.copy_(torch.randn_like(weights) * _VISION_SCALE)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder.resolve(model_folder.DEFAULT_NAME))
    tokenizer.add_special_tokens({"additional_special_tokens": list(_IMAGE_TOKENS)})
    if tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) != _FIRST_IMAGE_TOKEN_ID:
        raise ValueError(f"{IMAGE_TOKEN} is not the first token after those of the default model")
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "Idefics3ImageProcessor",
                "do_image_splitting": True,
                "max_image_size": {"longest_edge": _IMAGE_SIZE},
                "size": {"longest_edge": _IMAGE_SIZE * _TILES},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
            }
        ),
        encoding="utf-8",
    )
    Idefics3Processor(
        image_processor=AutoImageProcessor.from_pretrained(folder),
        tokenizer=tokenizer,
        image_seq_len=IMAGE_TOKENS_PER_TILE,
        chat_template=_IMAGE_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def _quantize(name: str, folder: Path) -> None:
    """Quantize the weights of linear layers by channel; inputs are quantized by token when they are computed."""
    import torch
    from safetensors.torch import load_file, save_file

    largest, dtype, _, _ = _QUANTIZED[name]
    file = folder / "model.safetensors"
    tensors = {}
    for key, weights in load_file(file).items():
        if not key.endswith("_proj.weight"):
            tensors[key] = weights
            continue
        scale = weights.abs().amax(1, keepdim=True) / largest
        scaled = weights / scale
        tensors[key] = (scaled.round() if dtype == "int8" else scaled).to(getattr(torch, dtype))
        tensors[f"{key}_scale"] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    config_file = folder / "config.json"
    values = json.loads(config_file.read_text(encoding="utf-8"))
    config_file.write_text(json.dumps(values | {"quantization_config": _quantization_config(name)}), encoding="utf-8")


def _quantization_config(name: str) -> dict[str, Any]:
    _, _, kind, tensor_format = _QUANTIZED[name]
    bits = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": tensor_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
