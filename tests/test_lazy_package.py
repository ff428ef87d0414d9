"""``import isoload`` imports no torch: its names and modules come when they are first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import isoload

SOURCE = Path(isoload.__file__)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["place", "--help"]], ids=" ".join)
def test_the_module_needs_no_torch_either(words: list[str]) -> None:
    """``python -m isoload`` imports the package before anything else; so does the entry point now."""
    code = "import runpy, sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
    code += f"sys.argv = ['isoload', *{words}]; runpy.run_module('isoload', run_name='__main__')"
    said = run(code)
    assert said == f"isoload {isoload.__version__}\n" if words == ["--version"] else "Usage: isoload" in said


def test_names_come_when_they_are_used() -> None:
    code = "import sys, isoload; assert 'torch' not in sys.modules and isoload.__version__\n"
    code += "assert set(isoload.__all__) <= set(dir(isoload))\n"
    code += "print(isoload.Topology(2).num_ranks, isoload.policies.plan.Plan.__name__)"
    assert run(code) == "2 Plan\n"
    assert run("from isoload import *; print(place.__name__, count.__name__)") == "place count\n"
    assert run("import isoload; print(isoload.traces.Trace.__name__)") == "Trace\n"


@pytest.mark.parametrize(
    "module", ["placement.placement", "ops", "weights.shard", "cli.app", "analysis.simulate"]
)
def test_any_module_may_be_the_first(module: str) -> None:
    assert run(f"import isoload.{module}; from isoload import MoE; print(MoE.__name__)") == "MoE\n"


@pytest.mark.parametrize("former", sorted(set(isoload._MOVED) - {"integrations"}))
def test_a_former_module_gives_the_names_of_the_new_one(former: str) -> None:
    new = import_module(f"isoload.{isoload._MOVED[former]}")
    name = next(name for name in vars(new) if not name.startswith("_"))
    scope: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match=f"^isoload.{former} is now {new.__name__}$"):
        exec(f"from isoload.{former} import {name}", scope)
    assert scope[name] is getattr(new, name)


def test_a_former_submodule_is_found_in_its_package() -> None:
    code = "import isoload; from isoload.replay import judge; print(judge.__name__)\n"
    code += "from isoload.integrations import huggingface; print(huggingface.__name__)\n"
    code += "import isoload.trace; print(isoload.trace.Trace is isoload.traces.Trace)"
    assert run(code) == "isoload.analysis.judge\nisoload.engines.huggingface\nTrue\n"


def test_what_is_not_there_is_said() -> None:
    for name in ("nothing", "_nothing", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"^module 'isoload' has no attribute '{name}'$"):
            getattr(isoload, name)


def test_type_checkers_read_the_same_names() -> None:
    (block,) = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    static = {
        (str(node.module), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {(f"isoload.{module}", name) for module, names in isoload._HOMES.items() for name in names}
    assert static == homes and {name for _, name in homes} == set(isoload.__all__)
