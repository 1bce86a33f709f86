"""`python -m mlxsup.gateway`: started by the supervisor, which writes a spec to standard input."""

from __future__ import annotations

import sys

from mlxsup.protocol.codec import read_line
from mlxsup.protocol.gateway import GatewaySpec

from .server import serve

BAD_SPEC_EXIT = 64


def run() -> int:
    """Read the spec and serve; return the exit code."""
    line = sys.stdin.buffer.readline()
    try:
        spec = read_line(GatewaySpec, line, "a gateway's spec")
    except ValueError as error:
        print(f"mlxsup gateway: {error}; `mlxsup start --http` starts one", file=sys.stderr)
        return BAD_SPEC_EXIT
    serve(spec)
    return 0


if __name__ == "__main__":
    sys.exit(run())
