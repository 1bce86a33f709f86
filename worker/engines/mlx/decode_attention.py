"""Attention of one token per row over keys that begin at another place in each row, with CUDA.

MLX has no kernel for it. With a mask it multiplies matrices, and reads the keys once for each head
of the queries: the 32 layers of an 8B model take 43 ms so on an H200 for 16 rows of 8,000 keys, and
8 ms here; 12 and 3 ms for 2,000 keys. Without a mask, which rows of one length could do, cuDNN
plans attention anew for each count of rows and every 256 keys, 40 to 70 ms each time.

The keys of a row are cut into parts, each read by a block of threads; a second kernel joins them.
Both are compiled once for a type of numbers, a width of heads and a count of heads that share keys.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

THREADS = 128
"""Of a block; eight features of a key are read by one of them."""

BLOCKS = 528
"""Enough to keep a large GPU busy: four for each of an H200's 132 processors."""

LEAST_KEYS = 64
"""Fewer keys are not worth a block of their own."""

WIDTHS = (64, 128, 256)
"""Features of a head that the threads of a warp can share out."""

MOST_SHARING = 8
"""Heads of queries that share one of keys, at most: their sums have to fit into a block's memory,
4 KiB for each."""

READ = """
    constexpr int LANES = D / 8, TEAMS = 128 / LANES, AHEAD = 4;
    struct alignas(16) Eight { T x[8]; };
    const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, splits = gridDim.x;
    const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    const int first = padding[row], count = keys_shape[2] - first;
    const int each = (count + splits - 1) / splits;
    const int begin = first + split * each, end = min(begin + each, int(keys_shape[2]));
    const T* key = keys + row * keys_strides[0] + head * keys_strides[1] + lane * 8;
    const T* value = values + row * values_strides[0] + head * values_strides[1] + lane * 8;

    float q[G][8], sum[G], top[G], mean[G][8];
    for (int g = 0; g < G; ++g) {
        const T* query = queries + row * queries_strides[0] + (head * G + g) * queries_strides[1];
        sum[g] = 0.f;
        top[g] = -3e38f;
        for (int i = 0; i < 8; ++i) {
            q[g][i] = float(query[lane * 8 + i]) * scale[0] * 1.44269504f;
            mean[g][i] = 0.f;
        }
    }
    for (int base = begin; base < end; base += TEAMS * AHEAD) {
        Eight k[AHEAD], v[AHEAD];
        float score[AHEAD][G];
        #pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            const int at = min(base + n * TEAMS + team, end - 1);
            k[n] = *reinterpret_cast<const Eight*>(key + at * keys_strides[2]);
            v[n] = *reinterpret_cast<const Eight*>(value + at * values_strides[2]);
        }
        #pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            #pragma unroll
            for (int g = 0; g < G; ++g) {
                float s = 0.f;
                #pragma unroll
                for (int i = 0; i < 8; ++i) s += q[g][i] * float(k[n].x[i]);
                #pragma unroll
                for (int step = LANES / 2; step; step /= 2) s += __shfl_xor_sync(~0u, s, step);
                score[n][g] = s;
            }
        }
        #pragma unroll
        for (int g = 0; g < G; ++g) {
            float best = top[g];
            #pragma unroll
            for (int n = 0; n < AHEAD; ++n) {
                if (base + n * TEAMS + team < end) best = max(best, score[n][g]);
            }
            const float kept = exp2f(top[g] - best);
            top[g] = best;
            sum[g] *= kept;
            #pragma unroll
            for (int i = 0; i < 8; ++i) mean[g][i] *= kept;
            #pragma unroll
            for (int n = 0; n < AHEAD; ++n) {
                const bool is_there = base + n * TEAMS + team < end;
                const float share = is_there ? exp2f(score[n][g] - best) : 0.f;
                sum[g] += share;
                #pragma unroll
                for (int i = 0; i < 8; ++i) mean[g][i] += share * float(v[n].x[i]);
            }
        }
    }
    __shared__ float all_tops[TEAMS][G], all_sums[TEAMS][G], all_means[TEAMS][G][D];
    for (int g = 0; g < G; ++g) {
        if (lane == 0) {
            all_tops[team][g] = top[g];
            all_sums[team][g] = sum[g];
        }
        for (int i = 0; i < 8; ++i) all_means[team][g][lane * 8 + i] = mean[g][i];
    }
    __syncthreads();
    for (int place = threadIdx.x; place < G * D; place += 128) {
        const int g = place / D, at = ((row * gridDim.y + head) * G + g) * splits + split;
        float best = -3e38f, total = 0.f, x = 0.f;
        for (int t = 0; t < TEAMS; ++t) best = max(best, all_tops[t][g]);
        for (int t = 0; t < TEAMS; ++t) {
            const float kept = exp2f(all_tops[t][g] - best);
            total += all_sums[t][g] * kept;
            x += all_means[t][g][place % D] * kept;
        }
        means[at * D + place % D] = x;
        if (place % D == 0) {
            tops[at] = best;
            sums[at] = total;
        }
    }
"""

JOIN = """
    const int splits = tops_shape[2], at = blockIdx.x * splits, i = threadIdx.x;
    float best = -3e38f, total = 0.f, x = 0.f;
    for (int s = 0; s < splits; ++s) best = max(best, tops[at + s]);
    for (int s = 0; s < splits; ++s) {
        const float kept = exp2f(tops[at + s] - best);
        total += sums[at + s] * kept;
        x += means[(at + s) * D + i] * kept;
    }
    out[blockIdx.x * D + i] = T(x / total);
"""


class DecodeAttention:
    """Attention as `mx.fast.scaled_dot_product_attention` computes it, whose place it takes, so
    that models need not know of it.

    Models pass on the mask that a cache has made for them. If it is the one that `hides` was told
    of last, its rows are known by the places where they begin; whatever a model has changed of it
    makes it another mask, and takes MLX's way.
    """

    def __init__(self) -> None:
        self._otherwise = mx.fast.scaled_dot_product_attention
        self._mask: mx.array | None = None
        self._padding: mx.array | None = None
        self._scales: dict[float, mx.array] = {}
        self._read: Any = mx.fast.cuda_kernel(
            name="decode_attention_read",
            input_names=["queries", "keys", "values", "padding", "scale"],
            output_names=["means", "sums", "tops"],
            source=READ,
            ensure_row_contiguous=False,  # the keys are parts of larger arrays
        )
        self._join: Any = mx.fast.cuda_kernel(
            name="decode_attention_join",
            input_names=["means", "sums", "tops"],
            output_names=["out"],
            source=JOIN,
        )

    def hides(self, mask: mx.array, padding: mx.array) -> None:
        """Note that a mask of the next pass hides nothing but so many first keys of each row.

        Args:
            mask: (rows, 1, 1, keys).
            padding: (rows,), of 32 bits.
        """
        self._mask, self._padding = mask, padding

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        """Return what each query sees, (rows, heads, tokens, width), as MLX's own function does."""
        is_known = mask is not None and mask is self._mask and sinks is None
        if not is_known or not _fits(q, k, v):
            return self._otherwise(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)
        rows, heads, _, width = q.shape
        key_heads, keys = k.shape[1:3]
        parts = max(min(-(-keys // LEAST_KEYS), -(-BLOCKS // (rows * key_heads))), 1)
        if scale not in self._scales:
            self._scales[scale] = mx.array(scale, mx.float32)
        sizes: list[tuple[str, Any]] = [("T", q.dtype), ("D", width), ("G", heads // key_heads)]
        found = self._read(
            inputs=[q, k, v, self._padding, self._scales[scale]],
            template=sizes,
            grid=(parts * THREADS, key_heads, rows),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(rows, heads, parts, width), *[(rows, heads, parts)] * 2],
            output_dtypes=[mx.float32] * 3,
        )
        out: mx.array = self._join(
            inputs=found,
            template=sizes[:2],
            grid=(rows * heads * width, 1, 1),
            threadgroup=(width, 1, 1),
            output_shapes=[q.shape],
            output_dtypes=[q.dtype],
        )[0]
        return out


def _fits(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """True if the kernels can read these queries, keys and values."""
    is_alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape and q.shape[3] == k.shape[3]
    shared = q.shape[1] // k.shape[1]
    return is_alike and q.shape[2] == 1 and q.shape[3] in WIDTHS and shared <= MOST_SHARING


_in_use: DecodeAttention | None = None


def use_decode_attention() -> None:
    """Let every model of this process that runs with CUDA compute attention so; once is enough."""
    global _in_use
    if _in_use is None:
        _in_use = DecodeAttention()
        mx.fast.scaled_dot_product_attention = _in_use


def hides(mask: mx.array, padding: mx.array) -> None:
    """See `DecodeAttention.hides`; without effect on other devices."""
    if _in_use is not None:
        _in_use.hides(mask, padding)
