"""Where mlx-lm itself makes a model type answer otherwise beside others, by file and line.

What makes one wrong even alone is the worker's business: `worker/engines/mlx/quirks.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class BatchFault(NamedTuple):
    """A line of mlx-lm, and what follows from it.

    Attributes:
        rows: names in the table.
        place: a file below the package `mlx_lm`, and a line.
        symbol: what that line holds.
        cause: a clause without its full stop.
    """

    rows: tuple[str, ...]
    place: str
    symbol: str
    cause: str


# fmt: off
BATCH_FAULTS = (
    BatchFault(
        ("afm7",), "models/afm7.py:255", "offset=S - L",
        "layers that reuse keys count positions by the width of the batch, padding included",
    ),
    BatchFault(
        ("baichuan_m1",), "models/baichuan_m1.py:120", "k_init[:, :, -1:, :]",
        "the convolution keeps the last column of the batch: padding, in shorter rows",
    ),
    BatchFault(
        ("bailing_moe_linear",), "models/bailing_moe_linear.py:313", "recurrent_gla(",
        "the linear attention gets a mask and does not use it",
    ),
    BatchFault(
        ("gemma2",), "models/gemma2.py:98", "scores = mx.where(",
        "scores of grouped heads have a dimension more than the mask of a batch; with two rows it "
        "raises",
    ),
    BatchFault(
        ("gpt_bigcode",), "models/gpt_bigcode.py:150", "np.arange(cache[0].offset",
        "positions are computed for one row; with two it raises",
    ),
    BatchFault(
        ("internlm2_dynamic", "internlm3_dynamic", "qwen2_dynamic_rope"),
        "models/rope_utils.py:260", "max(x.shape[-2] + offset",
        "`rope_type: dynamic` compares one position with a limit; with two rows it raises",
    ),
    BatchFault(
        ("jamba",), "models/jamba.py:278", "self.mamba(self.input_layernorm(x), cache)",
        "the state-space layers get no mask",
    ),
    BatchFault(
        ("llama4", "deepseek_v41"), "generate.py:837", "does not yet support batching with history",
        "a cache of this kind cannot join a batch",
    ),
    BatchFault(
        ("longcat_flash_ngram",), "models/longcat_flash_ngram.py:120", "context.shape[-1] - self.n",
        "the context that is kept is shorter for rows that have read less, so that rows cannot be "
        "joined, and holds padding",
    ),
    BatchFault(
        ("mamba", "falcon_mamba"), "models/mamba.py:142", "def __call__(self, x, cache)",
        "the state-space layers take no mask",
    ),
    BatchFault(
        ("minimax_m3_vl",), "models/minimax_m3_vl.py:293", "qpos // block_size",
        "blocks of keys are cut with the padding in them",
    ),
    BatchFault(
        ("nemotron_h",), "models/nemotron_h.py:211", "ssm_update(",
        "the state-space layers are not given the lengths of the rows",
    ),
    BatchFault(
        ("nemotron-nas",), "models/nemotron-nas.py:395", "if layer.self_attn is not None",
        "a layer whose attention is linear gets a cache that it never fills, and an empty one "
        "cannot be taken out of a batch",
    ),
    BatchFault(
        ("olmo_hybrid",), "models/olmo_hybrid.py:140", "padded[:, -n_keep:, :]",
        "the convolution keeps the last columns of the batch, which are padding in shorter rows",
    ),
    BatchFault(
        ("recurrent_gemma",), "models/recurrent_gemma.py:101", "x[:, -K + 1 :, :]",
        "the recurrent layers take no mask, and keep the last columns of the batch",
    ),
    BatchFault(
        ("recurrent_gemma",), "models/recurrent_gemma.py:158", "multiplier[:, 0, :] = 1.0",
        "the first token of a text is recognised by having no state; in a batch there always is "
        "one, of zeros, so that a prompt of one token is computed otherwise",
    ),
    BatchFault(
        ("rwkv7",), "models/rwkv7.py:315", "def __call__(self, x, v_first, cache)",
        "the recurrent layers take no mask",
    ),
)

LOAD_FAULTS = (
    BatchFault(
        ("bitnet",), "models/bitlinear_layers.py:80", "metal_kernel(",
        "its layers need Metal",
    ),
    BatchFault(
        ("muse_spark",), "kernels/qk_norm_rope.py:54", "metal_kernel(",
        "its layers need Metal",
    ),
)
# fmt: on
