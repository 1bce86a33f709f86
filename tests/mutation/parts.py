"""The parts of mlxsup that have a score, the files of each, and the fast tests of each.

Fast tests run in one process with at most a few children, most of them in milliseconds. Those of a
part are its own: that a test of something else also fails says little about the part's tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

NOT_FAST = (
    "tests/unit/test_architecture.py",
    "tests/unit/test_documents.py",
    "tests/unit/test_mutation.py",
    "tests/mlx/test_mlx_lm_facts.py",
    "tests/mlx/test_models_document.py",
    "tests/mlx/test_demo_model.py",
    "tests/mlx/test_resume_demo.py",
)
"""Those that judge texts, this tool, other people's libraries, or a model of real size."""

NEVER_CHOSEN = (
    "test_a_look_up_beside_long_and_many_sequences_takes_no_time",
    "test_a_seed_replays_event_by_event_under_any_hash_seed_P22",
    "test_a_planted_bug_is_seen",
    "test_planted_bugs_are_up_to_date",
    "test_every_module_of_the_core_has_a_planted_bug",
    "test_the_oracle_of_suspicion_follows",
)
"""Parts of names of tests: a figure, and tests of the simulation itself, some of which look for
texts of the core."""

MOST_TEST_S = 3.0
"""A test that works longer on the right code is not fast; the simulation's seeds are exempt."""

MOST_WORK_S = 25.0
"""What all tests chosen for one mutant may work together, on the right code."""

SIMULATION = "tests/unit/test_core_simulation.py"

SHELL_ROOMS = ("config", "memory", "sockets", "workers")

UNMEASURED = (
    "worker/engines/fake/*.py",
    "cli/**/*.py",
    "gateway/**/*.py",
    "store/*.py",
    "downloader/*.py",
)
"""The engine of tests and demonstrations, the command line, the gateway, which is a client, the
models on disk and their downloads: no parts of the promises' code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of mlxsup.

    Attributes:
        name: as the document has it.
        globs: its files, from the root of the tree.
        tests: files of its fast tests.
    """

    name: str
    globs: tuple[str, ...]
    tests: tuple[str, ...]

    def files(self, root: Path) -> list[str]:
        """Its files below `root`, sorted."""
        found = {path.relative_to(root).as_posix() for g in self.globs for path in root.glob(g)}
        return sorted(path for path in found if not path.endswith("__init__.py"))


PARTS = (
    Part(name="core", globs=("supervisor/core/**/*.py",), tests=("tests/unit/test_core_*.py",)),
    Part(
        name="shell",
        globs=("supervisor/*.py", *(f"supervisor/{room}/*.py" for room in SHELL_ROOMS)),
        tests=(
            "tests/unit/test_supervisor_*.py",
            "tests/unit/test_operations_document.py",
            "tests/integration/test_supervisor_*.py",
        ),
    ),
    Part(
        name="loop",
        globs=("worker/*.py", "worker/text/*.py"),
        tests=(
            "tests/unit/test_worker_*.py",
            "tests/mlx/test_structured*.py",
            "tests/integration/test_worker_parent_watch.py",
            "tests/contract/test_*.py",
            "tests/mlx/test_harmony.py",
        ),
    ),
    Part(
        name="engine",
        globs=("worker/engines/mlx/*.py",),
        tests=(
            "tests/unit/test_engine_*.py",
            "tests/unit/test_worker_*.py",
            "tests/contract/test_*.py",
            "tests/mlx/test_*.py",
        ),
    ),
    Part(
        name="client",
        globs=("client/*.py",),
        tests=(
            "tests/unit/test_client_*.py",
            "tests/unit/test_parameters*.py",
            "tests/integration/test_client_*.py",
        ),
    ),
    Part(
        name="protocol",
        globs=("protocol/*.py",),
        tests=(
            "tests/unit/test_protocol_*.py",
            "tests/unit/test_parameters*.py",
            "tests/unit/test_worker_launch*.py",
            "tests/unit/test_client_*.py",
            "tests/unit/test_supervisor_config*.py",
            "tests/unit/test_operations_document.py",
            "tests/integration/test_protocol_document.py",
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A tree that can be measured: mlxsup, or a toy in the tool's own tests.

    Attributes:
        root: of the tree.
        parts: what has a score.
        packages: folders whose lines are counted.
        import_roots: folders from which children and tests import, from the root.
        not_fast: test files that are left out.
        never_chosen: parts of names of tests.
        namespace: what stands before the packages' names in an import.
        has_hypothesis: whether its tests draw examples, which a seed then fixes.
    """

    root: Path
    parts: tuple[Part, ...] = PARTS
    packages: tuple[str, ...] = ("protocol", "supervisor", "worker", "client")
    import_roots: tuple[str, ...] = ("typings", "tests")
    not_fast: tuple[str, ...] = NOT_FAST
    never_chosen: tuple[str, ...] = NEVER_CHOSEN
    namespace: str = "mlxsup."
    has_hypothesis: bool = True

    def test_files(self, part: Part) -> list[str]:
        """The files of a part's fast tests, sorted."""
        found = {p.relative_to(self.root).as_posix() for g in part.tests for p in self.root.glob(g)}
        return sorted(found - set(self.not_fast))

    def at(self, root: Path) -> Project:
        """The same project in another folder."""
        return replace(self, root=root)

    def module_of(self, path: str) -> str:
        """The name that a file is imported by."""
        return self.namespace + path.removesuffix(".py").replace("/", ".")
