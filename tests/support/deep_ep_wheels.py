"""The wheels of DeepEP where `make test-deepep` has unpacked them: signatures, and their plain-torch references.

Neither is imported as a package, which would start a compiler and ask for a GPU: signatures are read from the source,
and ``utils/refs.py`` runs with a stand-in for the compiled module.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

WHEELS = Path(__file__).parents[2] / "build" / "deepep"
PACKAGES = {"sgl-deep-ep-v25": "deep_ep_v25", "sgl-deep-ep": "deep_ep"}


def why_absent() -> str | None:
    missing = [module for module in PACKAGES.values() if not (WHEELS / module).is_dir()]
    return (
        f"{', '.join(missing)} not in {WHEELS.parent.name}/{WHEELS.name}: make test-deepep"
        if missing
        else None
    )


def version_of(distribution: str) -> str:
    (folder,) = WHEELS.glob(f"{distribution.replace('-', '_')}-*.dist-info")
    return re.search(r"^Version: (.+)$", (folder / "METADATA").read_text(), re.M)[1]


def signatures_in(module: str, wanted: set[str]) -> dict[str, str]:
    """ "Class.method" -> its arguments and defaults, for those wanted that are there."""
    found = {}
    for path in sorted([*(WHEELS / module).glob("buffers/*.py"), *(WHEELS / module).glob("buffer.py")]):
        for made in (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)):
            for method in (node for node in made.body if isinstance(node, ast.FunctionDef)):
                if (name := f"{made.name}.{method.name}") in wanted:
                    found[name] = arguments_of(method.args)
    return found


def arguments_of(given: ast.arguments) -> str:
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    parts = [
        a.arg if d is None else f"{a.arg}={ast.unparse(d)}" for a, d in zip(given.args, defaults, strict=True)
    ]
    if given.vararg and given.kwarg:
        parts += [f"*{given.vararg.arg}", f"**{given.kwarg.arg}"]
    return ", ".join(parts)


def references(module: str) -> Any:
    """The wheel's utils/refs.py."""
    compiled = ModuleType(f"{module}._C")
    compiled.__getattr__ = _nothing  # type: ignore[method-assign]
    for name, folder in ((module, WHEELS / module), (f"{module}.utils", WHEELS / module / "utils")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    sys.modules[f"{module}._C"] = compiled
    return importlib.import_module(f"{module}.utils.refs")


def _nothing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: 0
