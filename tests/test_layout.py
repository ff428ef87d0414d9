"""The shape of the repository: imports run one way, torch stays in the binding, nothing grows past 600 lines."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import isoload
import reference
from isoload import ops

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "isoload"

# Lowest first; a module may import from its own room, the folder or file of its first name, and from floors below.
FLOORS = [
    ["__main__", "files", "kernels", "replica_tables", "results", "value_checks", "wording"],
    [
        *("ops", "options", "permutation", "report", "shared_experts", "steps", "times", "topology"),
        "trace",
    ],
    ["cost", "experts", "predict", "records"],
    ["checkpoints", "formats", "placers", "policies", "transport"],
    ["balancing", "weights"],
    ["layer", "replay"],
    ["advise", "online"],
    ["__init__", "integrations"],
    ["cli"],
]
MOST_FLOORS = 9  # as many as one holds in mind


def module_of(path: Path) -> str:
    """The dotted name of a file below isoload; a folder's own name for its __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))} | {
    "kernels": ROOT / "kernels/__init__.py"
}


def floor_of(module: str) -> int:
    """That of its room."""
    height = {name: level for level, names in enumerate(FLOORS) for name in names}
    return height[module.split(".")[0]]


def imported(path: Path) -> Iterator[str]:
    """Dotted isoload modules that a file imports when it runs: those for type checkers alone are left out."""
    tree = ast.parse(path.read_text())
    typed = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {child for block in typed for child in ast.walk(block)}
    for node in (node for node in ast.walk(tree) if node not in skipped):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "isoload":
            base = ".".join(node.module.split(".")[1:])
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in MODULES or inner.startswith("kernels.") else base
        elif isinstance(node, ast.Import):
            yield from (n.name.removeprefix("isoload.") for n in node.names if n.name.startswith("isoload."))


def tracked(*patterns):
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listing.stdout.split() if (ROOT / name).exists()]


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    assert len(FLOORS) <= MOST_FLOORS
    room = module.split(".")[0]
    for other in filter(None, imported(MODULES[module])):
        assert other.split(".")[0] == room or floor_of(other) < floor_of(module), (
            f"{module} must not import {other}"
        )


def test_imports_form_no_circle() -> None:
    """Inside folders, too. A folder's __init__ stands for all that it imports."""
    graph = {name: {o for o in imported(path) if o in MODULES} - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()


def test_the_package_has_rooms() -> None:
    """Modules that lie flat in it are the ground; what uses them has a folder."""
    flat = [name for name in MODULES if "." not in name and MODULES[name].parent == PACKAGE]
    assert len(flat) <= 12, flat
    assert [m for m in flat if m != "__init__" and floor_of(m) > 2] == []


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
        assert set(imported(path)) <= {"replica_tables", "results"}, path


def test_kernels_know_nothing_above_them() -> None:
    for path in (ROOT / "kernels").glob("*.py"):
        assert {name.split(".")[0] for name in imported(path)} <= {"kernels"}, path


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
    wrapper = (PACKAGE / f"ops/{stem}.py").read_text()
    assert f"def {op}(" in wrapper and re.search(rf'op\(\s*"{op}",', wrapper)
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
    shared = {"__init__", "library", "load"}
    assert {p.stem for p in (PACKAGE / "ops").glob("*.py")} - shared == stems


def test_every_cuda_op_is_benched() -> None:
    text = (ROOT / "bench/lib/gpu_jobs.py").read_text()
    jobs = {*re.findall(r'Job\(\s*"(\w+)', text), *re.findall(r'\bof="(\w+)"', text)} - {"chain"}
    elsewhere = {"borrow", "borrow_backward", "device_errors"}  # bench_borrow.py; the floor of bench_cuda.py
    assert jobs == set(LISTED) - elsewhere


def test_contributing_names_the_five_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for file in (
        "csrc/algorithms/X.h",
        "csrc/ops/X.cpp",
        "python/isoload/ops/X.py",
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
    command = [sys.executable, "-m", "support.every_door"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.findall("^(?:import|every door): .*", done.stdout, re.M) == ["import: []", "every door: []"]


def test_few_names_are_public() -> None:
    """What most programs need, and names that issues ask for; all else by module."""
    named_by_issues = {"save", "load"}
    assert len(isoload.__all__) == len(set(isoload.__all__)) <= 24 + len(named_by_issues)
    assert named_by_issues <= set(isoload.__all__)
