"""What arrays take once they are loaded, and in which precision a model computes: by hand."""

from __future__ import annotations

import pytest

from mlxsup.supervisor.memory.folder import Tensor
from mlxsup.supervisor.memory.weights import is_of_text_model, loaded_bytes, number_bytes


def tensor(dtype: str, name: str = "model.layers.0.mlp.up_proj.weight", size: int = 10) -> Tensor:
    return Tensor(name=name, shape=(size,), dtype=dtype, size_bytes=size)


def test_the_other_parts_of_a_model_are_not_loaded() -> None:
    left_out = (
        "vision_tower.layers.0.weight", "visual.blocks.0.weight", "model.audio_tower.weight",
        "multi_modal_projector.weight", "mm_projector.0.weight", "patch_merge.weight",
        "mtp.layers.0.weight",
    )  # fmt: skip
    assert [name for name in left_out if is_of_text_model(name)] == []
    kept = ("model.embed_tokens.weight", "language_model.model.layers.0.weight", "lm_head.weight")
    assert [name for name in kept if not is_of_text_model(name)] == []
    both = [tensor("F16", name, 7) for name in kept] + [tensor("F16", name) for name in left_out]
    assert loaded_bytes(both) == 3 * 7


def test_only_numbers_of_eight_bits_are_widened() -> None:
    for dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        assert loaded_bytes([tensor(dtype)]) == 20, dtype
    for dtype in ("F32", "BF16", "U8", "I8", "U32"):
        assert loaded_bytes([tensor(dtype)]) == 10, dtype


def test_the_type_of_most_arrays_is_that_of_the_numbers() -> None:
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    found = {dtype: number_bytes({}, [tensor(dtype), tensor("U32")]) for dtype in sizes}
    assert found == sizes
    # They are counted, however large they are.
    assert number_bytes({}, [tensor("F16"), tensor("F16"), tensor("F32", size=1000)]) == 2
    assert number_bytes({}, [tensor("F32"), tensor("F16"), tensor("F32")]) == 4


def test_without_such_arrays_numbers_have_two_bytes() -> None:
    assert number_bytes({}, []) == number_bytes({}, [tensor("U32"), tensor("I64")]) == 2
    assert number_bytes({"dtype": "float32"}, [tensor("U32")]) == 2
    assert number_bytes({}, [tensor("F32", "vision_tower.weight")]) == 2


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_model_in_eight_bits_computes_in_what_its_config_says(key: str) -> None:
    arrays = [tensor("F8_E4M3"), tensor("F32"), tensor("F32")]
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 2, None: 2}
    assert {name: number_bytes({key: name}, arrays) for name in sizes} == sizes
    assert number_bytes({}, arrays) == 2


def test_the_newer_name_of_the_precision_goes_first() -> None:
    arrays = [tensor("F8_E4M3")]
    assert number_bytes({"dtype": "float32", "torch_dtype": "float16"}, arrays) == 4
    assert number_bytes({"dtype": "", "torch_dtype": "float32"}, arrays) == 4


def test_a_tower_in_eight_bits_says_nothing_about_the_text_model() -> None:
    arrays = [tensor("F8_E4M3", "vision_tower.weight"), tensor("BF16")]
    assert number_bytes({"dtype": "float32"}, arrays) == 2
