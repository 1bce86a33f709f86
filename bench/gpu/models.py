"""The models of the GPU's rows: random weights of real sizes, made in seconds and then kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from ..fast_path.stages import Setting
from ..shaped_model import SEVEN_B, SMALL, Shape, make_shaped_model
from support.tiny_model import VOCABULARY_SIZE

CONTEXT = 40960
VOCABULARY = 49152
SHAPES = {
    "7b": replace(SEVEN_B, vocabulary=VOCABULARY),
    "1b4": Shape(
        layers=16, hidden=2048, intermediate=8192, heads=32, key_value_heads=8,
        vocabulary=VOCABULARY, bits=4,
    ),
    "03b": replace(SMALL, vocabulary=VOCABULARY),
    "drawn": SMALL,
}  # fmt: skip
"""The last one draws with a temperature, and draws no id that the tokenizer does not know."""

TRIAL = Shape(layers=2, hidden=128, intermediate=256, heads=2, key_value_heads=2, dtype="float32")
MADE = "made.json"


def model(setting: Setting, name: str) -> Path:
    """The folder of a model, made unless it is there."""
    shape = SHAPES[name]
    if setting.is_small:
        vocabulary = min(shape.vocabulary, 2 * VOCABULARY_SIZE)
        shape = replace(TRIAL, bits=shape.bits, vocabulary=vocabulary)
    folder = setting.models / name
    made, about = folder / MADE, json.dumps([asdict(shape), CONTEXT])
    if not made.exists() or made.read_text() != about:
        shutil.rmtree(folder, ignore_errors=True)
        make_shaped_model(folder, shape, seed=list(SHAPES).index(name), context_length=CONTEXT)
        made.write_text(about)
    return folder
