"""Attention of one token per row over keys that begin at another place in each row, with CUDA.

MLX has no kernel for it. With a mask it multiplies matrices, and reads the keys once for each head
of the queries: the 32 layers of an 8B model take 43 ms so on an H200 for 16 rows of 8,000 keys, and
8 ms here; 12 and 3 ms for 2,000 keys. Without a mask, which one row or rows of one length could do,
cuDNN plans attention anew for each count of rows and every 256 keys, 40 to 70 ms each time, and
compiles kernels for some of them, 0.75 s: one row of 8,000 keys gets 86 to 107 tokens a second so,
and 146 to 161 here.

The keys of a row are cut into parts, each read by a block of threads; a second kernel joins them.
They include no header, so that CUDA's compiler needs a tenth of a second for a type of numbers, a
width of heads and a count of heads that share keys; `mx.fast.cuda_kernel` takes 2.4 s for each
kernel, in every process.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from mlxsup.protocol.text import log_line

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

TOLERANCE = 0.03
"""Between the numbers of two ways to compute attention in 16 bits."""

TYPES = {
    mx.bfloat16: (
        "unsigned short",
        "return __uint_as_float(unsigned(x) << 16);",
        "unsigned u = __float_as_uint(x); return (u + 0x7fff + (u >> 16 & 1)) >> 16;",
    ),
    mx.float16: (
        "unsigned short",
        'float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f;',
        'T u; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(u) : "f"(x)); return u;',
    ),
    mx.float32: ("float", "return x;", "return x;"),
}
"""A type of numbers in CUDA, and how it is read as `float` and written."""

SOURCE = """
typedef TYPE T;
__device__ float wide(T x) { READ_AS }
__device__ T narrow(float x) { WRITE_AS }

struct alignas(16) Eight { T x[8]; };

extern "C" __global__ void READ_KERNEL(
    const T* queries, const T* keys, const T* values, const int* padding,
    float* means, float* sums, float* tops, int seen, int room, float scale
) {
    constexpr int LANES = D / 8, TEAMS = THREADS / LANES, AHEAD = 4;
    const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, splits = gridDim.x;
    const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    const int first = padding[row], count = seen - first;
    const int each = (count + splits - 1) / splits;
    const int begin = first + split * each, end = min(begin + each, seen);
    const long long held = (long long)(row * gridDim.y + head);
    const T* key = keys + held * room * D + lane * 8;
    const T* value = values + held * room * D + lane * 8;

    float q[G][8], sum[G], top[G], mean[G][8];
    for (int g = 0; g < G; ++g) {
        const T* query = queries + (held * G + g) * D + lane * 8;
        sum[g] = 0.f;
        top[g] = -3e38f;
        for (int i = 0; i < 8; ++i) {
            q[g][i] = wide(query[i]) * scale * 1.44269504f;
            mean[g][i] = 0.f;
        }
    }
    for (int base = begin; base < end; base += TEAMS * AHEAD) {
        Eight k[AHEAD], v[AHEAD];
        float score[AHEAD][G];
        #pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            const int at = min(base + n * TEAMS + team, end - 1);
            k[n] = *reinterpret_cast<const Eight*>(key + (long long)at * D);
            v[n] = *reinterpret_cast<const Eight*>(value + (long long)at * D);
        }
        #pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            #pragma unroll
            for (int g = 0; g < G; ++g) {
                float s = 0.f;
                #pragma unroll
                for (int i = 0; i < 8; ++i) s += q[g][i] * wide(k[n].x[i]);
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
                for (int i = 0; i < 8; ++i) mean[g][i] += share * wide(v[n].x[i]);
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
    for (int place = threadIdx.x; place < G * D; place += THREADS) {
        const int g = place / D;
        const long long at = (held * G + g) * splits + split;
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
}

extern "C" __global__ void JOIN_KERNEL(
    const float* means, const float* sums, const float* tops, T* out, int splits
) {
    const long long at = (long long)blockIdx.x * splits;
    float best = -3e38f, total = 0.f, x = 0.f;
    for (int s = 0; s < splits; ++s) best = max(best, tops[at + s]);
    for (int s = 0; s < splits; ++s) {
        const float kept = exp2f(tops[at + s] - best);
        total += sums[at + s] * kept;
        x += means[(at + s) * D + threadIdx.x] * kept;
    }
    out[blockIdx.x * D + threadIdx.x] = narrow(x / total);
}
"""

logger = logging.getLogger(__name__)


class CompileError(Exception):
    """CUDA's compiler is not there, or refuses the kernels."""


class Kernels(NamedTuple):
    """Both kernels, compiled. Each call gives MLX their code: it knows a kernel that it has loaded
    by its name and a hash of the code."""

    code: bytes
    read: str
    join: str


def make_kernels(dtype: mx.Dtype, width: int, shared: int) -> Kernels:
    """Return the kernels for some sizes.

    Args:
        dtype: of queries, keys and values.
        width: of a head.
        shared: heads of the queries that share one of keys.

    Raises:
        CompileError: see there.
    """
    kind, read, write = TYPES[dtype]
    source = SOURCE.replace("TYPE", kind).replace("READ_AS", read).replace("WRITE_AS", write)
    sizes = f"{str(dtype).rpartition('.')[2]}_{width}_{shared}"
    names = (f"decode_attention_read_{sizes}", f"decode_attention_join_{sizes}")
    for name, value in (
        *zip(("READ_KERNEL", "JOIN_KERNEL"), names, strict=True),
        *(("D", width), ("G", shared), ("THREADS", THREADS)),
    ):
        source = f"#define {name} {value}\n{source}"
    return Kernels(compile_source(source), *names)


def compile_source(source: str) -> bytes:
    """Compile CUDA's C++ for the GPU that MLX uses: an older driver refuses the portable form of a
    newer compiler.

    Raises:
        CompileError: see there.
    """
    option = f"--gpu-architecture={mx.device_info().get('architecture')}".encode()
    compiler, program = _open_compiler(), ctypes.c_void_p()
    name = b"decode_attention.cu"
    _check(compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name, 0, None, None))
    try:
        _check(compiler.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(option)))
        size = ctypes.c_size_t()
        _check(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(compiler.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _open_compiler() -> Any:
    """Return CUDA's runtime compiler, which MLX's library has loaded."""
    for version in (13, 12):
        try:
            return ctypes.CDLL(f"libnvrtc.so.{version}")
        except OSError:
            continue
    raise CompileError("libnvrtc.so was not found")


def _check(result: int) -> None:
    if result:
        raise CompileError(f"nvrtc failed with error {result}")


def _nothing() -> None:
    """Stand for an array that is not there."""


class DecodeAttention:
    """Attention as `mx.fast.scaled_dot_product_attention` computes it, whose place it takes, so
    that models need not know of it.

    Models pass on the mask that a cache has made for them, and what it has fetched. If these are
    the ones that `hides` and `fetched` were told of last, the rows are known by the places where
    they begin; one row without a mask begins at the first. An array that a model has made of them
    is another one, and takes MLX's way.
    """

    def __init__(self) -> None:
        self._otherwise = mx.fast.scaled_dot_product_attention
        # Weak: what a batch has left behind must not stay in memory until the next one decodes.
        self._mask: Callable[[], mx.array | None] = _nothing
        self._padding: mx.array | None = None
        self._no_padding = mx.array([0])
        self._fetched: tuple[Callable[[], mx.array | None], ...] = (_nothing,) * 4
        self._kernels: dict[tuple[mx.Dtype, int, int], Kernels | None] = {}  # None: not compiled

    def hides(self, mask: mx.array, padding: mx.array) -> None:
        """Note that a mask of the next pass hides nothing but so many first keys of each row.

        Args:
            mask: (rows, 1, 1, keys).
            padding: (rows,), of 32 bits.
        """
        self._mask, self._padding = weakref.ref(mask), padding

    def fetched(
        self, seen_keys: mx.array, seen_values: mx.array, keys: mx.array, values: mx.array
    ) -> None:
        """Note of which arrays the keys and values that a layer looks at are the beginning.

        Args:
            seen_keys, seen_values: (rows, heads, seen, width).
            keys, values: (rows, heads, places, width).
        """
        self._fetched = tuple(map(weakref.ref, (seen_keys, seen_values, keys, values)))

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
        seen_keys, seen_values, keys, values = (each() for each in self._fetched)
        padding = self._padding_of(mask, rows=q.shape[0])
        is_known = padding is not None and k is seen_keys and v is seen_values
        kernels = self._kernels_for(q, k, v) if is_known and sinks is None else None
        if kernels is None or keys is None or values is None or padding is None:
            return self._otherwise(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)
        return _run(kernels, q, keys, values, padding, seen=k.shape[2], scale=scale)

    def _padding_of(self, mask: Any, *, rows: int) -> mx.array | None:
        """Return how many first keys of each row a mask hides; None: it is another mask."""
        if mask is None:
            return self._no_padding if rows == 1 else None
        return self._padding if mask is self._mask() else None

    def _kernels_for(self, q: mx.array, k: mx.array, v: mx.array) -> Kernels | None:
        """Return the kernels that read these queries, keys and values; None: there are none."""
        shared = q.shape[1] // k.shape[1]
        is_alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape
        is_one = q.shape[2] == 1 and q.shape[3] in WIDTHS and shared <= MOST_SHARING
        if not is_alike or not is_one or q.dtype not in TYPES:
            return None
        key = (q.dtype, q.shape[3], shared)
        if key not in self._kernels:
            try:
                kernels = make_kernels(*key)
                self._try_out(kernels, *key)
                self._kernels[key] = kernels
            except (CompileError, RuntimeError, ValueError) as error:  # MLX's, of the GPU
                self._kernels[key] = None
                logger.warning(log_line("MLX's slower attention is used", reason=str(error)))
        return self._kernels[key]

    def _try_out(self, kernels: Kernels, dtype: mx.Dtype, width: int, shared: int) -> None:
        """Raise CompileError unless the kernels see what MLX's attention sees."""
        q, keys, values = (
            mx.random.normal((2, heads, tokens, width), key=mx.random.key(heads)).astype(dtype)
            for heads, tokens in ((shared, 1), (1, 80), (1, 80))
        )
        padding, seen = mx.array([0, 70]), 75
        found = _run(kernels, q, keys, values, padding, seen=seen, scale=0.1)
        k, v = keys[..., :seen, :], values[..., :seen, :]
        mask = (padding[:, None] <= mx.arange(seen))[:, None, None]
        known = self._otherwise(q, k, v, scale=0.1, mask=mask)
        if not mx.allclose(found, known, rtol=TOLERANCE, atol=TOLERANCE).item():
            raise CompileError("the kernels compute something else than MLX does")


def _run(
    kernels: Kernels,
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    padding: mx.array,
    *,
    seen: int,
    scale: float,
) -> mx.array:
    """Return what each query sees of the first `seen` keys but those that are padding."""
    rows, heads, _, width = q.shape
    key_heads, places = keys.shape[1:3]
    parts = max(min(-(-seen // LEAST_KEYS), -(-BLOCKS // (rows * key_heads))), 1)
    found = mx.fast.precompiled_cuda_kernel(
        name=kernels.read,
        compiled_source=kernels.code,
        inputs=[q, keys, values, padding],
        output_shapes=[(rows, heads, parts, width), *[(rows, heads, parts)] * 2],
        output_dtypes=[mx.float32] * 3,
        # Their types decide how the kernel reads them. MLX takes a float only if 32 bits hold it.
        scalars=[seen, places, ctypes.c_float(scale).value],
        grid=(parts * THREADS, key_heads, rows),
        threadgroup=(THREADS, 1, 1),
        ensure_row_contiguous=True,
    )
    joined: list[mx.array] = mx.fast.precompiled_cuda_kernel(
        name=kernels.join,
        compiled_source=kernels.code,
        inputs=found,
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
        scalars=[parts],
        grid=(rows * heads * width, 1, 1),
        threadgroup=(width, 1, 1),
    )
    return joined[0]


def attention_in_use() -> DecodeAttention | None:
    """Return what the models of this process compute attention with; None: MLX's own function."""
    attention = mx.fast.scaled_dot_product_attention
    return attention if isinstance(attention, DecodeAttention) else None


def use_decode_attention() -> None:
    """Let every model of this process that runs with CUDA compute attention so; once is enough."""
    if attention_in_use() is None:
        mx.fast.scaled_dot_product_attention = DecodeAttention()
