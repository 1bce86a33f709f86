"""Tiny encoders and embedding decoders with random weights, in the files of the hub's models."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from mlxsup.worker.engines.mlx.encoders import ENCODER_CLASSES, Config

WORDS = (
    "tide",
    "lantern",
    "amber",
    "harbour",
    "moss",
    "omega",
    "river",
    "cloud",
    "what",
    "is",
    "a",
)
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
VOCABULARY = (*SPECIAL, *WORDS)

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 48, "max_position_embeddings": 160, "pad_token_id": 0}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertModel"], **SIZES,
             "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"},
    "xlm-roberta": {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], **SIZES,
                    "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1},
    "modernbert": {"model_type": "modernbert", "architectures": ["ModernBertModel"], **SIZES,
                   "local_attention": 16, "global_attn_every_n_layers": 3, "norm_eps": 1e-5},
    "nomic_bert": {"model_type": "nomic_bert", "architectures": ["NomicBertModel"],
                   "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48,
                   "n_positions": 160, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
                   "activation_function": "swiglu", "type_vocab_size": 2,
                   "layer_norm_epsilon": 1e-12, "qkv_proj_bias": False, "mlp_fc1_bias": False,
                   "mlp_fc2_bias": False, "prenorm": False},
    "bert ranks": {"model_type": "bert", "architectures": ["BertForSequenceClassification"],
                   **SIZES, "type_vocab_size": 2, "id2label": {"0": "LABEL_0"}},
    "xlm-roberta ranks": {"model_type": "xlm-roberta",
                          "architectures": ["XLMRobertaForSequenceClassification"], **SIZES,
                          "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5,
                          "id2label": {"0": "LABEL_0"}},
    "modernbert ranks": {"model_type": "modernbert",
                         "architectures": ["ModernBertForSequenceClassification"], **SIZES,
                         "local_attention": 16, "classifier_pooling": "mean",
                         "id2label": {"0": "LABEL_0"}},
}  # fmt: skip


def make_tiny_encoder(
    folder: Path, name: str, *, mode: str = "", dtype: mx.Dtype = mx.float32, scale: float = 1.0
) -> Path:
    """Write the folder of an encoder; return it.

    Args:
        folder: created.
        name: of `CONFIGS`.
        mode: of a 1_Pooling folder; empty: there is none.
        dtype: of the weights.
        scale: of the embeddings' weights; large ones overflow in 16 bits.
    """
    config = CONFIGS[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model: Any = ENCODER_CLASSES[config["model_type"]](Config(config))
    weights = {}
    for path, array in tree_flatten(model.parameters()):
        random = np.random.default_rng(zlib.crc32(path.encode()))
        noise = random.standard_normal(array.shape).astype(np.float32)
        is_norm = array.ndim == 1 and path.endswith("weight")
        spread = 0.1 if array.ndim == 1 else 1.5 / array.shape[-1] ** 0.5
        weights[path] = mx.array(noise * spread + is_norm).astype(dtype)
        if "embeddings" in path and array.ndim > 1:
            weights[path] = weights[path] * scale
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    write_word_tokenizer(folder)
    if mode:
        write_modules(folder, mode)
    return folder


def write_modules(folder: Path, mode: str, **said: Any) -> None:
    """Write what sentence-transformers has beside a model."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"x.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    settings = {
        f"pooling_mode_{one}": one == mode for one in ("cls_token", "mean_tokens", "lasttoken")
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))


def write_word_tokenizer(folder: Path) -> None:
    """Write a tokenizer of a few words, with the marks that BERT puts around texts."""
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "cls_token": "[CLS]",
        "sep_token": "[SEP]", "unk_token": "[UNK]",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
