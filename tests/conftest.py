"""Settings of every test."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.isolation import nothing_is_left_behind, run_of_tests
from support.quick_imports import transformers_index

__all__ = ["nothing_is_left_behind", "run_of_tests"]

MOST_PROCESSES = 8
"""Each may hold a GiB of models, and their daemons as much again."""

# A shared machine may be slow for a second, and the first run builds its character tables: neither
# says anything about the code. Each run draws others: few in each find the same bugs in the end.
settings.register_profile(
    "mlxsup", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mlxsup")

# Processes inherit what is ignored, and whatever starts the tests in the background ignores these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


# Whatever collecting makes lives on: looking through it again and again takes a third of its time.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leave what was imported and collected out of every later collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # at the usual 700, collections took 2 of 76 seconds
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Have all processes of this run, the first one's children, import transformers quickly."""
    if transformers_index.FOLDER in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="mlxsup-tests-")
    config.add_cleanup(functools.partial(shutil.rmtree, folder))
    quick = os.fspath(Path(transformers_index.__file__).parent)
    os.environ[transformers_index.FOLDER] = os.path.join(sys.prefix, "transformers-index")
    # What mlx-lm has said of a tiny model for one test holds for the others.
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [quick, os.environ.get("PYTHONPATH")]))
    transformers_index.install()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Kernels of other shapes round differently on a GPU: mlxsup promises equal bits on the CPU."""
    is_concerned = item.get_closest_marker("bits") and item.get_closest_marker("mlx")
    if is_concerned and is_mlx_on_gpu():
        pytest.skip("equal bits in any batch are promised on the CPU only")


@functools.cache
def is_mlx_on_gpu() -> bool:
    """Whether MLX would use a GPU here."""
    import mlx.core as mx

    return bool(mx.default_device().type == mx.DeviceType.gpu)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: some tests wait, and each process collects for ten seconds."""
    return min((os.cpu_count() or 1) + 1, MOST_PROCESSES)
