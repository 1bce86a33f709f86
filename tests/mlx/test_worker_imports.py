"""What a worker imports of packages that other programs have installed: nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

HEAVY = ("torch", "torchvision", "tensorflow", "jax", "flax", "scipy", "sklearn", "pandas")

PROGRAM = """\
import json, sys
from pathlib import Path
from mlxsup.worker.engines.mlx.imports import import_everything
import_everything()
from mlxsup.worker.engines.mlx.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]), None)
ids = tokenizer.encode("hello")
print(json.dumps([name for name, module in sys.modules.items() if module is not None]))
"""


def install(folder: Path, package: str) -> None:
    """As pip would: the module, and what transformers asks for its version."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text('__version__ = "2.9.0"\nTensor = object\n')
    about = folder / f"{package}-2.9.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.9.0\n")
    (about / "RECORD").write_text(f"{package}/__init__.py,,\n")


def test_a_worker_imports_none_of_the_heavy_packages(tmp_path: Path) -> None:
    model, packages = make_tiny_model(tmp_path / "tiny"), tmp_path / "packages"
    packages.mkdir()
    for package in HEAVY:
        install(packages, package)
    path = os.pathsep.join([os.fspath(packages), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, os.fspath(model)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert "transformers" in imported
    assert not imported.intersection(HEAVY)
