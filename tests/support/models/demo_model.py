"""The real model that tests and the demo use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
FETCH_TIMEOUT_S = 900.0


def demo_model_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct; downloaded and converted once.

    Raises:
        AssertionError: it cannot be had here; the message is the tool's own sentence.
    """
    folder = CHECKOUT / "models" / "smollm2"
    if not folder.is_dir():
        command = [sys.executable, "-m", "mlxsup.cli.demo_model", str(folder)]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
        assert result.returncode == 0, result.stderr.strip()
    return folder
