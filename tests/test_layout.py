"""The shape of the repository: few packages, torch stays in the binding, nothing grows past 600 lines."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import isoload
import reference
from isoload import ops

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "isoload"


def tracked(*patterns):
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listing.stdout.split() if (ROOT / name).exists()]


def imported(path: Path) -> set[str]:
    """Dotted modules of isoload that a file names in its import statements."""
    return {
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "isoload"
    }


def test_few_packages_with_full_files() -> None:
    """The levels of packages are a contract of import-linter in pyproject.toml."""
    entries = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} - {"kernels"}
    assert len(entries) == 14
    sizes = {
        path: len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and not path.is_relative_to(PACKAGE / "kernels")
    }
    assert len(sizes) <= 150
    assert len([path for path, lines in sizes.items() if lines < 60]) <= 12


def test_tests_import_no_tests() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^(from|import) test_", path.read_text(), re.M), path


def test_benches_import_no_tests() -> None:
    """But the harness of an engine on a CPU, in that engine's environment; steps of `make gpu` start tests."""
    naming = {
        path.name
        for path in (ROOT / "bench").rglob("*.py")
        if re.search(r'^(from|import) (support|reference)\b|^sys\.path.*"tests"', path.read_text(), re.M)
    }
    assert naming == {"bench_sglang.py", "bench_vllm.py", "gpu_steps.py"}


def test_reference_knows_only_torch_the_tables_and_the_results() -> None:
    for path in (ROOT / "tests" / "reference").glob("*.py"):
        assert imported(path) <= {"isoload.ops.tables", "isoload.ops.results"}, path


def test_kernels_know_nothing_above_them() -> None:
    for path in (ROOT / "kernels").glob("*.py"):
        assert all(name.startswith("isoload.kernels") for name in imported(path)), path


def test_only_kernels_name_triton():
    """And their __init__ only inside a function, so that nothing imports Triton before it is needed."""
    naming = {p for p in PACKAGE.rglob("*.py") if re.search(r"^\s*(import|from) triton", p.read_text(), re.M)}
    assert naming == set()
    assert not re.search(r"^(import|from) triton", (ROOT / "kernels" / "__init__.py").read_text(), re.M)


def test_torch_stays_in_the_binding():
    csrc = ROOT / "csrc"
    including = {
        "ops/" if p.parent == csrc / "ops" else str(p.relative_to(csrc))
        for p in csrc.rglob("*.*")
        if "<torch/" in p.read_text()
    }
    assert including == {"check.h", "ops.cpp", "ops/"}


def test_algorithms_use_no_containers():
    for path in (ROOT / "csrc" / "algorithms").glob("*.h"):
        assert not re.search(
            r"std::(vector|map|set|unordered|array|string|thread)|\bnew |malloc", path.read_text()
        ), path


def test_no_file_grows_past_600_lines():
    sources = tracked("*.py", "*.h", "*.cpp", "*.cu")
    assert len(sources) > 30
    assert [str(p) for p in sources if len(p.read_text().splitlines()) > 600] == []


LISTED = re.findall(r"^  OP\((\w+), \\\n", (ROOT / "csrc/ops/list.h").read_text(), re.M)
VARIANT = re.compile(
    "_(sampled|by_rank|backward)$"
)  # shares the files of its op, unless it has all of its own


def stem_of(op: str) -> str:
    return op if (ROOT / f"csrc/ops/{op}.cpp").exists() else VARIANT.sub("", op)


@pytest.mark.parametrize("op", LISTED)
def test_every_op_has_its_five_files(op: str) -> None:
    """The recipe in CONTRIBUTING.md: the same stem everywhere, and a line in the list."""
    stem = stem_of(op)
    assert f"ISOLOAD_OP({op})\n" in (ROOT / f"csrc/ops/{stem}.cpp").read_text()
    wrappers = [path for path in (PACKAGE / "ops").glob("*.py") if f"\ndef {op}(" in path.read_text()]
    assert len(wrappers) == 1 and f'op("{op}")' in wrappers[0].read_text()
    assert op in ops.__all__
    assert (ROOT / f"tests/ops/test_{stem}.py").exists()
    if op == "device_errors":  # reads what kernels left, and computes nothing
        return
    algorithm = ROOT / f"csrc/algorithms/{stem}.h"
    assert algorithm.exists() or (ROOT / f"csrc/cpu/{stem}.h").exists()
    assert (ROOT / f"csrc/cuda/{stem}.cu").exists()
    assert f"def {op}(" in (ROOT / f"tests/reference/{stem}.py").read_text()
    assert op in reference.__all__


def test_no_file_of_an_op_is_left_over() -> None:
    stems = {stem_of(op) for op in LISTED}
    assert len(LISTED) >= 19
    assert {p.stem for p in (ROOT / "csrc/ops").glob("*.cpp")} == stems
    # Kernels of an op that shares a stem may have a file of their own.
    assert {p.stem for p in (ROOT / "csrc/cuda").glob("*.cu")} <= stems | set(LISTED)
    helpers = {"counted_deal", "cpu", "planner"}
    assert {p.stem for p in (ROOT / "csrc/cpu").glob("*")} - helpers <= stems


def test_every_cuda_op_is_benched() -> None:
    text = (ROOT / "bench/lib/gpu_jobs.py").read_text()
    jobs = {*re.findall(r'Job\(\s*"(\w+)', text), *re.findall(r'\bof="(\w+)"', text)} - {"chain"}
    elsewhere = {
        "borrow",
        "borrow_backward",
        "device_errors",
    }  # no job of its own; the floor of bench_cuda.py
    assert jobs == set(LISTED) - elsewhere


def test_contributing_names_the_five_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for file in (
        "csrc/algorithms/X.h",
        "csrc/ops/X.cpp",
        "tests/reference/X.py",
    ):
        assert f"`{file}`" in text, file
    for file in ("tests/ops/test_X.py", "csrc/ops/list.h", "csrc/cpu/X.h", "csrc/cuda/X.cu"):
        assert f"`{file}`" in text, file


@pytest.mark.slow
def test_no_compiler_is_imported_before_it_is_used():
    """Neither by importing isoload nor by any first call: it takes seconds, and Triton comes with it, which then
    defines its functions before a test can ask for its interpreter."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "support.every_entry_point"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.findall("^(?:import|every entry point): .*", done.stdout, re.M) == [
        "import: []",
        "every entry point: []",
    ]


def test_few_names_are_public() -> None:
    """What most programs need, and names that issues ask for; all else by module."""
    named_by_issues = {
        "save",
        "load",
        "KnownRoutes",
        "choose_micro_batches",
        "parallelize",
        "clip_grad_norm_",
    }
    assert len(isoload.__all__) == len(set(isoload.__all__)) <= 24 + len(named_by_issues)
    assert named_by_issues <= set(isoload.__all__)
