"""Tiny models with a vision tower and random weights, one for each family that is served, and
pictures for them.

They need the extra `vision`: mlx-vlm writes the weights.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from support.models.tiny_model import CONTEXT_LENGTH, VOCABULARY_SIZE, add_tokens, write_tokenizer

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's folder looks.

    Attributes:
        config: of config.json.
        tokens: the family's own, the last of the vocabulary.
        shown: how the template shows a picture.
        processor: of preprocessor_config.json.
        named: of the tokens, by the name that the processor looks for.
        embedded: how large embeddings are.
        processor_config: of processor_config.json.
    """

    config: Config
    tokens: tuple[str, ...]
    shown: str
    processor: Config
    processor_config: Config = field(default_factory=dict)
    named: Config = field(default_factory=dict)
    embedded: float = 1.0


def _template(shown: str) -> str:
    return (
        "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if p.type == 'image' %}" + shown + "{% else %}"
        "{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )


TEXT: Config = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY_SIZE, "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: Config = {
    "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 2, "patch_size": 8,
    "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "num_position_embeddings": 64,
}  # fmt: skip
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIRST_QWEN = VOCABULARY_SIZE - len(QWEN_TOKENS)
QWEN_IDS: Config = {
    "vision_start_token_id": FIRST_QWEN, "vision_end_token_id": FIRST_QWEN + 1,
    "image_token_id": FIRST_QWEN + 2, "video_token_id": FIRST_QWEN + 3,
}  # fmt: skip
MROPE: Config = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN_SIZE: Config = {
    "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 16 * 16,
    "max_pixels": 64 * 64,
}  # fmt: skip
QWEN_SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
DELTA: Config = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS: Config = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        config=TEXT | QWEN_IDS | {
            "rope_scaling": MROPE,
            "vision_config": TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        },
        tokens=QWEN_TOKENS, shown=QWEN_SHOWN,
        processor=QWEN_SIZE | {"image_processor_type": "Qwen2VLImageProcessor"},
        processor_config={"processor_class": "Qwen2VLProcessor"},
    ),
    "qwen2_5_vl": Family(
        config=TEXT | QWEN_IDS | {
            "rope_scaling": MROPE,
            "vision_config": TOWER | {"window_size": 32, "fullatt_block_indexes": [1]},
        },
        tokens=QWEN_TOKENS, shown=QWEN_SHOWN,
        processor=QWEN_SIZE | {"image_processor_type": "Qwen2VLImageProcessor"},
        processor_config={"processor_class": "Qwen2_5_VLProcessor"},
    ),
    "qwen3_vl": Family(
        config=QWEN_IDS | {
            "text_config": TEXT | {
                "model_type": "qwen3_vl_text", "num_hidden_layers": 3, "rope_scaling": MROPE,
            },
            "vision_config": TOWER | {"deepstack_visual_indexes": [0, 1]},
        },
        tokens=QWEN_TOKENS, shown=QWEN_SHOWN,
        processor=QWEN_SIZE | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        processor_config={"processor_class": "Qwen3VLProcessor"},
    ),
    "qwen3_5": Family(
        config=QWEN_IDS | {
            "text_config": TEXT | DELTA | {
                "model_type": "qwen3_5_text", "num_hidden_layers": 4, "full_attention_interval": 2,
                "rope_parameters": {
                    "type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                },
            },
            "vision_config": TOWER,
        },
        tokens=QWEN_TOKENS, shown=QWEN_SHOWN,
        processor=QWEN_SIZE | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        processor_config={"processor_class": "Qwen3VLProcessor"},
    ),
    "gemma3": Family(
        config={
            "image_token_index": VOCABULARY_SIZE - 1, "boi_token_index": VOCABULARY_SIZE - 3,
            "eoi_token_index": VOCABULARY_SIZE - 2, "mm_tokens_per_image": 16,
            "hidden_size": 64, "pad_token_id": 0, "vocab_size": VOCABULARY_SIZE,
            "text_config": TEXT | {
                "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 24,
                "sliding_window_pattern": 3, "query_pre_attn_scalar": 16,
                "rope_local_base_freq": 10000.0, "rope_global_base_freq": 1000000.0,
                "mm_tokens_per_image": 16,
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8,
                "image_size": 64, "num_channels": 3, "layer_norm_eps": 1e-6,
            },
        },
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        shown="<start_of_image>",
        processor={
            "image_processor_type": "Gemma3ImageProcessor", "do_normalize": True,
            "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255,
            "size": {"height": 64, "width": 64}, "do_pan_and_scan": None,
        },
        processor_config={"image_seq_length": 16, "processor_class": "Gemma3Processor"},
        embedded=0.1,
        named={
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
    "pixtral": Family(
        config={
            "image_token_index": VOCABULARY_SIZE - 3, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full", "vocab_size": VOCABULARY_SIZE,
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "patch_size": 8,
                "image_size": 64, "num_channels": 3, "rope_theta": 10000.0,
            },
        },
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), shown="[IMG]",
        processor={
            "image_processor_type": "PixtralImageProcessor", "patch_size": 8,
            "size": {"longest_edge": 64}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
            "do_normalize": True, "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255,
        },
        processor_config={"processor_class": "PixtralProcessor", "patch_size": 8},
    ),
    "mistral3": Family(
        config={
            "image_token_index": VOCABULARY_SIZE - 3, "vision_feature_layer": -1,
            "spatial_merge_size": 2, "vocab_size": VOCABULARY_SIZE, "projector_hidden_act": "gelu",
            "multimodal_projector_bias": False,
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "patch_size": 8,
                "image_size": 64, "num_channels": 3, "rope_theta": 10000.0,
            },
        },
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), shown="[IMG]",
        processor={
            "image_processor_type": "PixtralImageProcessor", "patch_size": 8,
            "size": {"longest_edge": 64}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
            "do_normalize": True, "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255,
        },
        processor_config={
            "processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2,
        },
    ),
}  # fmt: skip
_PLAIN = FAMILIES["qwen3_5"]
_TEXT = _PLAIN.config["text_config"] | EXPERTS | {"model_type": "qwen3_5_moe_text"}
FAMILIES["qwen3_5_moe"] = replace(_PLAIN, config=_PLAIN.config | {"text_config": _TEXT})


def make_tiny_vision(folder: Path, model_type: str = "qwen3_vl", *, seed: int = 0) -> Path:
    """Write the folder of a tiny model that takes pictures; return it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm import utils

    family = FAMILIES[model_type]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    add_tokens(folder, family.tokens, is_special=True)
    config = {"model_type": model_type} | family.config
    _change(
        folder / "tokenizer_config.json",
        chat_template=_template(family.shown),
        extra_special_tokens=family.named,
    )
    _change(folder / "config.json", **config)
    _change(folder / "preprocessor_config.json", **family.processor)
    if family.processor_config:
        _change(folder / "processor_config.json", **family.processor_config)
    config = json.loads((folder / "config.json").read_text())
    module, _ = utils.get_model_and_args(config)
    for name in ("text_config", "vision_config", "audio_config"):
        config.setdefault(name, {})
    made = module.ModelConfig.from_dict(config)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    mx.random.seed(seed)  # some parameters begin as random numbers
    model = module.Model(utils.update_module_configs(made, module, config, parts))
    draw = np.random.default_rng(seed)
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        drawn = draw.normal(size=array.shape).astype(np.float32)
        if array.ndim < 2:
            weights[name] = array + mx.array(0.05 * drawn)
        else:
            width = family.embedded if "embed" in name else float(np.prod(array.shape[1:])) ** -0.5
            weights[name] = mx.array(1.5 * width * drawn)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _change(path: Path, **values: Any) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def picture(seed: int = 0, size: tuple[int, int] = (48, 32), kind: str = "PNG") -> bytes:
    """Return the file of a picture of noise, another one for each seed."""
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def asked(text: str, *files: bytes) -> dict[str, Any]:
    """Return a message of the user with pictures before its text."""
    parts: list[dict[str, Any]] = [{"type": "image", "data": data} for data in files]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def plain_answer(
    folder: Path, messages: list[dict[str, Any]], count: int
) -> tuple[list[int], list[int]]:
    """Return a prompt's ids and its greedy answer by mlx-vlm alone: without a cache, in one piece.

    All pictures go to the processor at once, with the whole text.
    """
    import mlx.core as mx
    from mlx_vlm import utils
    from transformers import AutoProcessor

    model = utils.load_model(folder)
    processor = AutoProcessor.from_pretrained(folder)
    parts = [part for one in messages for part in one["content"] if isinstance(part, dict)]
    images = [Image.open(io.BytesIO(one["data"])) for one in parts if one["type"] == "image"]
    text = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    if images:
        made = dict(processor(text=[text], images=images, add_special_tokens=False))
    else:
        made = {"input_ids": [processor.tokenizer.encode(text, add_special_tokens=False)]}
    ids = np.asarray(made.pop("input_ids")).reshape(-1).tolist()
    arrays = {
        name: value if isinstance(value, mx.array) else mx.array(np.asarray(value))
        for name, value in made.items()
        if name not in ("attention_mask", "token_type_ids", "mm_token_type_ids")
    }
    pixels, tokens = arrays.pop("pixel_values", None), list[int]()
    for _ in range(count):
        row = mx.array([ids + tokens])
        found = model.get_input_embeddings(row, pixels, mask=mx.ones_like(row), **arrays).to_dict()
        left_out = ("attention_mask_4d", "rope_deltas")
        named = {k: v for k, v in found.items() if v is not None and k not in left_out}
        likeliest: Any = mx.argmax(model.language_model(row, **named).logits[0, -1]).item()
        tokens.append(likeliest)
    return ids, tokens
