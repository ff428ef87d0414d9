"""The shape of the repository: imports run one way, torch stays in the binding, nothing grows past 400 lines."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "isoload"

# Lowest first; a module may import from its own line and from the lines above it.
LAYERS = [
    ["topology", "replica_tables", "value_checks", "shared_experts", "migration", "cost", "kernels"],
    ["permutation"],
    ["reference", "ops"],
    ["placement"],
    ["records"],
    [
        "policies",
        "placers",
        "trace",
        "transport",
        "routers",
        "experts",
        "expert_weights",
        "grouped_linear",
        "grouping",
    ],
    ["counting", "planning", "modules"],
    ["routing", "residence", "resident"],
    ["borrowing"],
    ["joining"],
    ["transfer"],
    ["moe"],
    ["batches", "calibration", "metrics", "layer_cost", "inspection", "workloads"],
    ["simulate"],
    ["doctor", "demo"],
    ["report", "cost_report"],
    ["cli"],
    ["__main__", "__init__"],
]


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """isoload modules that a file imports when it runs (TYPE_CHECKING blocks aside)."""
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
            parts = node.module.split(".")[1:]
            yield from parts[:1] if parts else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (n.name.split(".")[1] for n in node.names if n.name.startswith("isoload."))


def tracked(*patterns):
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listing.stdout.split() if (ROOT / name).exists()]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    height = {name: level for level, names in enumerate(LAYERS) for name in names}
    module = module_of(path)
    assert module in height, f"{module} has no layer: add it to LAYERS"
    for other in imported(path):
        if other == "__version__":
            continue
        assert height[other] <= height[module], f"{module} must not import {other}"


def test_reference_knows_only_torch_and_the_tables():
    for path in (PACKAGE / "reference").glob("*.py"):
        assert set(imported(path)) <= {"reference", "replica_tables"}, path


def test_kernels_know_nothing_above_them():
    for path in (ROOT / "kernels").glob("*.py"):
        assert set(imported(path)) <= {"kernels"}, path


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
        assert f"isoload.{name}.default" in (ROOT / "tests" / f"test_{stem}.py").read_text(), (
            f"opcheck of {name}"
        )
