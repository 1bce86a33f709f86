"""CUDA kernels on a processor: their own source, compiled by g++; its threads take turns."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

HEADER = Path(__file__).with_suffix(".h")

LAUNCH = """
extern "C" void run_read(
    int x, int y, int z, int threads, const T* queries, const T* keys, const T* values,
    const int* padding, float* means, float* sums, float* tops, int seen, int room, float scale
) {
    launch({x, y, z}, threads, [=] {
        READ_KERNEL(queries, keys, values, padding, means, sums, tops, seen, room, scale);
    });
}
extern "C" void run_join(
    int x, int y, int z, int threads, const float* means, const float* sums, const float* tops,
    T* out, int splits
) {
    launch({x, y, z}, threads, [=] { JOIN_KERNEL(means, sums, tops, out, splits); });
}
"""


class PlayedKernels:
    """Plays CUDA's compiler, and MLX's function that runs what it has compiled.

    Attributes:
        runs: how many kernels were run.

    Args:
        folder: for the libraries.
    """

    def __init__(self, folder: Path) -> None:
        self.runs = 0
        self._folder = folder

    def compile(self, source: str) -> bytes:
        """Return the path of a library that has the kernels of `source`."""
        place = self._folder / f"{hashlib.sha256(source.encode()).hexdigest()}.so"
        if not place.exists():
            text = f'#include "{HEADER}"\n{source}\n{LAUNCH}'
            command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-xc++"]
            subprocess.run([*command, "-", "-o", str(place)], input=text.encode(), check=True)
        return bytes(place)

    def run(
        self,
        *,
        name: str,
        compiled_source: bytes,
        inputs: list[mx.array],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        scalars: list[int | float],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        ensure_row_contiguous: bool = False,
    ) -> list[mx.array]:
        """Run a kernel; see `mx.fast.precompiled_cuda_kernel`.

        Raises:
            ValueError: 32 bits do not hold a float, which MLX refuses too.
        """
        self.runs += 1
        if not all(ctypes.c_float(n).value == n for n in scalars if isinstance(n, float)):
            raise ValueError("a float that 32 bits do not hold")
        library = ctypes.CDLL(compiled_source.decode())
        kernel = library.run_read if "_read_" in name else library.run_join
        given = [np.ascontiguousarray(_bits(each)) for each in inputs]
        outputs = [
            np.full(shape, 77, np.uint16 if dtype.size == 2 else np.float32)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        blocks = [-(-all_ // own) for all_, own in zip(grid, threadgroup, strict=True)]
        pointers = [each.ctypes.data_as(ctypes.c_void_p) for each in (*given, *outputs)]
        numbers = [ctypes.c_float(n) if isinstance(n, float) else n for n in scalars]
        kernel(*blocks, threadgroup[0], *pointers, *numbers)
        return [
            mx.array(out).view(dtype) if dtype.size == 2 else mx.array(out)
            for out, dtype in zip(outputs, output_dtypes, strict=True)
        ]


def _bits(array: mx.array) -> Any:
    """Return an array as numpy has it; numbers of 16 bits as these."""
    return np.array(array.view(mx.uint16) if array.dtype.size == 2 else array)
