"""The quick version of `make soak` (J4)."""

from __future__ import annotations

import pytest
from soak.__main__ import soak


@pytest.mark.mlx
def test_nothing_grows_in_ordinary_use_J4() -> None:
    assert "0 rows left" in soak(0.1, seed=1, tell=lambda line: None)
