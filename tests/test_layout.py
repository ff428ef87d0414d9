"""The shape of the repository: imports run one way, torch stays in the binding, nothing grows past 400 lines."""

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "isoload"

# Lowest first; a module may import from its own floor and from those below. A folder stands for its modules, unless
# they are named themselves.
FLOORS = [
    [
        "topology",
        "replica_tables",
        "value_checks",
        "shared_experts",
        "cost",
        "kernels",
        "report.tables",
        "report.files",
    ],
    ["permutation", "reference"],
    ["ops"],
    ["placed_layers", "placement"],
    ["records"],
    ["policies", "placers", "trace", "transport", "experts"],
    ["counting", "planning"],
    ["routing", "workloads"],
    ["balancer"],
    ["weights"],
    ["layer"],
    ["replay"],
    ["report", "cli.demo", "cli.doctor", "cli.processes"],
    ["cli"],
    ["__main__", "__init__"],
]
HIGHEST_TOP_LEVEL = 10  # modules that lie flat in the package are the ground; what uses them has a folder


def module_of(path: Path) -> str:
    """The dotted name of a file below isoload; a folder's own name for its __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))} | {
    "kernels": ROOT / "kernels/__init__.py"
}


def floor_of(module: str) -> int:
    """That of the longest name in FLOORS which the module is, or lies in."""
    height = {name: level for level, names in enumerate(FLOORS) for name in names}
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in height:
            return height[name]
    raise AssertionError(f"{module} has no floor: add it to FLOORS")


def imported(path: Path) -> Iterator[str]:
    """Dotted isoload modules that a file imports when it runs (TYPE_CHECKING blocks aside)."""
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
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
    for other in filter(None, imported(MODULES[module])):
        assert floor_of(other) <= floor_of(module), f"{module} must not import {other}"


def test_imports_form_no_circle() -> None:
    """Inside folders, too. A folder's __init__ stands for all that it imports."""
    graph = {name: {o for o in imported(path) if o in MODULES} - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()


def test_the_package_has_rooms() -> None:
    flat = [name for name in MODULES if "." not in name and MODULES[name].parent == PACKAGE]
    assert len(flat) <= 20, flat
    ends = ("__main__", "__init__")
    assert [m for m in flat if m not in ends and floor_of(m) > HIGHEST_TOP_LEVEL] == []


def test_tests_import_no_tests() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^(from|import) test_", path.read_text(), re.M), path


def test_reference_knows_only_torch_and_the_tables() -> None:
    for path in (PACKAGE / "reference").glob("*.py"):
        assert {name.split(".")[0] for name in imported(path)} <= {"reference", "replica_tables"}, path


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


def test_no_file_grows_past_400_lines():
    sources = tracked("*.py", "*.h", "*.cpp", "*.cu")
    assert len(sources) > 30
    assert [str(p) for p in sources if len(p.read_text().splitlines()) > 400] == []


def test_every_op_has_wrapper_fake_reference_and_test():
    schemas = re.findall(
        r'"(\w+)\(', (ROOT / "csrc" / "ops.cpp").read_text().split("STABLE_TORCH_LIBRARY(isoload")[1]
    )
    ops = "".join(path.read_text() for path in sorted((PACKAGE / "ops").glob("*.py")))
    assert len(schemas) == len(set(schemas)) >= 6
    for name in schemas:
        assert f"def {name}(" in ops, name
        assert f'register_fake("isoload::{name}")' in ops, name
        own = PACKAGE / "reference" / f"{name}.py"
        alone = own.exists() or name == "device_errors"  # which reads what kernels left, and computes nothing
        variant = "_(sampled|by_rank|backward)$"  # shares a file
        stem = name if alone else re.sub(variant, "", name)
        if name != "device_errors":
            assert f"def {name}(" in (PACKAGE / "reference" / f"{stem}.py").read_text(), name
        assert f"isoload.{name}.default" in (ROOT / "tests" / "ops" / f"test_{stem}.py").read_text(), (
            f"opcheck of {name}"
        )
