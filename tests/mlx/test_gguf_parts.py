"""What the converter does to single arrays, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxsup.worker.engines.mlx.gguf import (
    quantization,
    save_weights,
    undo_interleave,
)

pytestmark = pytest.mark.mlx


def test_interleaved_rows_come_back_as_halves() -> None:
    heads, half = 2, 3
    halves = mx.arange(heads * 2 * half * 2).reshape(heads * 2 * half, 2)
    interleaved = halves.reshape(heads, 2, half, 2).swapaxes(1, 2).reshape(-1, 2)
    assert interleaved.tolist() != halves.tolist()
    assert undo_interleave(interleaved, heads).tolist() == halves.tolist()


def test_the_quantization_entry_names_what_differs() -> None:
    def scales(columns: int) -> mx.array:
        return mx.zeros((4, columns))

    arrays = {
        "a.weight": mx.zeros((4, 8)),
        "a.scales": scales(2),
        "b.weight": mx.zeros((4, 8)),
        "b.scales": scales(2),
        "c.weight": mx.zeros((4, 16)),
        "c.scales": scales(2),
        "norm.weight": mx.zeros(4),
    }
    assert quantization(arrays) == {
        "group_size": 32,
        "bits": 4,
        "c": {"group_size": 32, "bits": 8},
    }
    assert quantization({"norm.weight": mx.zeros(4)}) == {}


def test_weights_that_cannot_be_written_are_an_error_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"{tmp_path} cannot be written to"):
        save_weights(tmp_path / "gone" / "model.safetensors", {"a": mx.zeros(3)})
