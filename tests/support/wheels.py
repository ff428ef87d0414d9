"""Engines' seams in unpacked wheels: their sources are parsed, nothing of them is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from isoload.engines.seams import Seam

Definition = ast.ClassDef | ast.FunctionDef


def definition(root: Path, target: str, follow: bool = False) -> Definition | None:
    """Return what a dotted path defines below a folder, under a condition of the module, too.

    Args:
        follow: whether a name counts that a module imports from another of the same engine.
    """
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = root.joinpath(*parts[:length])
        path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        if path.exists():
            node: ast.AST | None = ast.parse(path.read_text())
            for i, name in enumerate(parts[length:], length):
                inside = list(statements(getattr(node, "body", ())))
                node = next((of for of in inside if getattr(of, "name", None) == name), None)
                if node is None and follow and (origin := imported(inside, name, path, parts[:length])):
                    return definition(root, ".".join([origin, *parts[i + 1 :]]), follow)
            assert node is None or isinstance(node, Definition)
            return node
    return None


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body and of its conditions."""
    for one in body:
        yield one
        if isinstance(one, ast.If):
            yield from statements(one.body)
            yield from statements(one.orelse)


def imported(inside: Sequence[ast.stmt], name: str, path: Path, module: Sequence[str]) -> str:
    """Return the dotted path from which a module imports a name; empty: it does not."""
    package = list(module if path.stem == "__init__" else module[:-1])
    for one in inside:
        if isinstance(one, ast.ImportFrom):
            before = package[: len(package) - one.level + 1] if one.level else []
            for of in one.names:
                if (of.asname or of.name) == name:
                    return ".".join([*before, *filter(None, [one.module]), of.name])
    return ""


def parameters(found: Definition) -> str:
    """As :func:`isoload.engines.seams.bare_signature` writes them, without spaces."""
    if isinstance(found, ast.ClassDef):
        found = next(of for of in found.body if isinstance(of, ast.FunctionDef) and of.name == "__init__")
        found.args.args.pop(0)
    elif any(ast.unparse(of) == "classmethod" for of in found.decorator_list):
        found.args.args.pop(0)
    given = found.args
    for one in [*given.posonlyargs, *given.args, *given.kwonlyargs]:
        one.annotation = None
    return f"({ast.unparse(given)})".replace(" ", "")


def holds(root: Path, seam: Seam, follow: bool = False) -> bool:
    """Whether a seam is in an engine below a folder as its signatures say."""
    found = [definition(root, target, follow) for target in (seam.target, seam.older) if target]
    if not (there := [one for one in found if one is not None]):
        return False
    if seam.kind == "fields":
        body = there[0].body
        names = {
            of.target.id for of in body if isinstance(of, ast.AnnAssign) and isinstance(of.target, ast.Name)
        }
        return names | {getattr(of, "name", "") for of in body} >= set(seam.signatures)
    return parameters(there[0]) in [wanted.replace(" ", "") for wanted in seam.signatures]
