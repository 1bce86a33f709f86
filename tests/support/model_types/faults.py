"""Where mlx-lm itself makes a model type answer otherwise beside others, by file and line.

What makes one wrong even alone is the worker's business: `worker/engines/mlx/known_faults.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFault:
    """A line of mlx-lm, and what follows from it.

    Attributes:
        rows: names in the table.
        file: below the package `mlx_lm`.
        line: from 1.
        symbol: what that line holds.
        cause: a clause without its full stop.
    """

    rows: tuple[str, ...]
    file: str
    line: int
    symbol: str
    cause: str


BATCH_FAULTS = (
    BatchFault(
        rows=("afm7",),
        file="models/afm7.py",
        line=255,
        symbol="offset=S - L",
        cause="layers that reuse keys count positions by the width of the batch, padding included",
    ),
    BatchFault(
        rows=("baichuan_m1",),
        file="models/baichuan_m1.py",
        line=120,
        symbol="k_init[:, :, -1:, :]",
        cause="the convolution keeps the last column of the batch: padding, in shorter rows",
    ),
    BatchFault(
        rows=("bailing_moe_linear",),
        file="models/bailing_moe_linear.py",
        line=313,
        symbol="recurrent_gla(",
        cause="the linear attention gets a mask and does not use it",
    ),
    BatchFault(
        rows=("gemma2",),
        file="models/gemma2.py",
        line=98,
        symbol="scores = mx.where(",
        cause="scores of grouped heads have a dimension more than the mask of a batch; with two "
        "rows it raises",
    ),
    BatchFault(
        rows=("gpt_bigcode",),
        file="models/gpt_bigcode.py",
        line=150,
        symbol="np.arange(cache[0].offset",
        cause="positions are computed for one row; with two it raises",
    ),
    BatchFault(
        rows=("internlm2_dynamic", "internlm3_dynamic", "qwen2_dynamic_rope"),
        file="models/rope_utils.py",
        line=260,
        symbol="max(x.shape[-2] + offset",
        cause="`rope_type: dynamic` compares one position with a limit; with two rows it raises",
    ),
    BatchFault(
        rows=("jamba",),
        file="models/jamba.py",
        line=278,
        symbol="self.mamba(self.input_layernorm(x), cache)",
        cause="the state-space layers get no mask",
    ),
    BatchFault(
        rows=("llama4", "deepseek_v41"),
        file="generate.py",
        line=837,
        symbol="does not yet support batching with history",
        cause="a cache of this kind cannot join a batch",
    ),
    BatchFault(
        rows=("longcat_flash_ngram",),
        file="models/longcat_flash_ngram.py",
        line=120,
        symbol="context.shape[-1] - self.n",
        cause="the context that is kept is shorter for rows that have read less, so that rows "
        "cannot be joined, and holds padding",
    ),
    BatchFault(
        rows=("mamba", "falcon_mamba"),
        file="models/mamba.py",
        line=142,
        symbol="def __call__(self, x, cache)",
        cause="the state-space layers take no mask",
    ),
    BatchFault(
        rows=("minimax_m3_vl",),
        file="models/minimax_m3_vl.py",
        line=293,
        symbol="qpos // block_size",
        cause="blocks of keys are cut with the padding in them",
    ),
    BatchFault(
        rows=("nemotron_h",),
        file="models/nemotron_h.py",
        line=211,
        symbol="ssm_update(",
        cause="the state-space layers are not given the lengths of the rows",
    ),
    BatchFault(
        rows=("nemotron-nas",),
        file="models/nemotron-nas.py",
        line=395,
        symbol="if layer.self_attn is not None",
        cause="a layer whose attention is linear gets a cache that it never fills, and an empty "
        "one cannot be taken out of a batch",
    ),
    BatchFault(
        rows=("olmo_hybrid",),
        file="models/olmo_hybrid.py",
        line=140,
        symbol="padded[:, -n_keep:, :]",
        cause="the convolution keeps the last columns of the batch, which are padding in shorter "
        "rows",
    ),
    BatchFault(
        rows=("recurrent_gemma",),
        file="models/recurrent_gemma.py",
        line=101,
        symbol="x[:, -K + 1 :, :]",
        cause="the recurrent layers take no mask, and keep the last columns of the batch",
    ),
    BatchFault(
        rows=("recurrent_gemma",),
        file="models/recurrent_gemma.py",
        line=158,
        symbol="multiplier[:, 0, :] = 1.0",
        cause="the first token of a text is recognised by having no state; in a batch there always "
        "is one, of zeros, so that a prompt of one token is computed otherwise",
    ),
    BatchFault(
        rows=("rwkv7",),
        file="models/rwkv7.py",
        line=315,
        symbol="def __call__(self, x, v_first, cache)",
        cause="the recurrent layers take no mask",
    ),
)

LOAD_FAULTS = (
    BatchFault(
        rows=("bitnet",),
        file="models/bitlinear_layers.py",
        line=80,
        symbol="metal_kernel(",
        cause="its layers need Metal",
    ),
    BatchFault(
        rows=("muse_spark",),
        file="kernels/qk_norm_rope.py",
        line=54,
        symbol="metal_kernel(",
        cause="its layers need Metal",
    ),
)
