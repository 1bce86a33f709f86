"""`python -m mlxsup.downloader`: started by the supervisor or by `mlxsup pull`."""

from __future__ import annotations

import sys

from .process import run

if __name__ == "__main__":
    sys.exit(run())
