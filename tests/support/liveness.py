"""Which functions, classes, methods and constants of a package nothing reaches from what its users name.

Read from the syntax alone. What stands in a module is told from the same name in others by the imports; a method is
reached by any attribute of its name. So what is named dead is dead, and not all that is dead is named.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
QUIET = {"cache", "cached_property", "contextmanager", "dataclass", "lru_cache", "no_grad", "wraps"}
QUIET |= {"classmethod", "final", "overload", "property", "setter", "staticmethod", "total_ordering"}

Ref = tuple[str | None, str]  # (module, what stands in it); (None, word): a method, by its name


@dataclass
class Defined:
    """Something that has a name, and what its code refers to."""

    ref: Ref
    shown: str
    refs: set[Ref]


@dataclass
class Module:
    """A file: what it defines, what it imports, and what it refers to when it is read."""

    name: str
    imports: dict[str, set[Ref]] = field(default_factory=dict)  # two functions may import one name
    own: set[str] = field(default_factory=set)
    defined: list[Defined] = field(default_factory=list)
    run: set[Ref] = field(default_factory=set)

    def refs(self, *nodes: ast.AST) -> Iterator[Ref]:
        """What code refers to, words in strings among it (getattr, tables of names)."""
        for node in (inner for outer in nodes for inner in ast.walk(outer)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield from {(self.name, node.id)} if node.id in self.own else self.imports.get(node.id, ())
            elif isinstance(node, ast.Attribute):
                yield None, node.attr
                bound, *path = ast.unparse(node.value).split(".")
                for whole in self.imports.get(bound, ()):
                    yield ".".join(filter(None, (*whole, *path))), node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                yield None, node.value
                yield self.name, node.value

    def define(self, name: str, shown: str, *nodes: ast.AST, method: bool = False) -> None:
        ref = (None if method else self.name, name)
        self.defined.append(Defined(ref, shown, set(self.refs(*nodes)) - {ref}))


def read(path: Path, name: str, top: str) -> Module:
    """A file as the module of this dotted name; `top` is the package's."""
    tree, module = ast.parse(path.read_text()), Module(name)
    for node in ast.walk(tree):
        found: list[tuple[str, Ref]] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            found = [(a.asname or a.name, (node.module, a.name)) for a in node.names]
        elif isinstance(node, ast.Import):
            found = [
                (a.asname or a.name.split(".")[0], (a.name if a.asname else top, "")) for a in node.names
            ]
        for bound, ref in found:
            if (ref[0] or "").split(".")[0] == top:
                module.imports.setdefault(bound, set()).add(ref)
    module.own = {bound for node in tree.body for bound in names_of(node)}
    for node in tree.body:
        read_statement(module, node, path.name)
    return module


def names_of(node: ast.stmt) -> list[str]:
    """What a statement of a module binds, imports aside."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    given = node.targets if isinstance(node, ast.Assign) else []
    given = [node.target] if isinstance(node, ast.AnnAssign) else given
    return [n.id for target in given for n in ast.walk(target) if isinstance(n, ast.Name)]


def read_statement(module: Module, node: ast.stmt, file: str) -> None:
    bound = names_of(node)
    if bound == ["__all__"] or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    for name in bound:
        inner = [m for m in node.body if is_method(m)] if isinstance(node, ast.ClassDef) else []
        for method in inner:
            module.define(method.name, f"{module.name}.{name}.{method.name}", method, method=True)
        kept = [n for n in ast.iter_child_nodes(node) if n not in inner] if inner else [node]
        module.define(name, f"{module.name}.{name}", *kept)
        if isinstance(node, FUNCTIONS) and any(is_registered(by) for by in node.decorator_list):
            module.run.add((module.name, name))
    if not bound and not isinstance(node, (ast.Import, ast.ImportFrom)):
        module.run |= set(module.refs(node))


def is_method(node: ast.stmt) -> bool:
    """Python itself calls __those__."""
    return isinstance(node, FUNCTIONS) and not re.fullmatch("__.*__", node.name)


def is_registered(by: ast.expr) -> bool:
    """Whether a decorator may hand the function to somebody who calls it."""
    by = by.func if isinstance(by, ast.Call) else by
    return (by.attr if isinstance(by, ast.Attribute) else getattr(by, "id", "")) not in QUIET


def find_dead(
    package: Path, users: Iterable[Path], words: Iterable[str], called: Iterable[str] = ()
) -> list[str]:
    """Dotted names, sorted, of what nothing reaches.

    Args:
        package: the package's folder.
        users: files outside of it that use it.
        words: what documents name.
        called: dotted classes whose methods others call.
    """
    top = package.name
    modules = {}
    for path in package.rglob("*.py"):
        parts = (top, *path.relative_to(package).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = read(path, name, top)
    outside = [read(path, f"?{number}", top) for number, path in enumerate(users)]
    named, given = set(words), tuple(f"{name}." for name in called)
    todo: dict[Ref, list[Defined]] = {}
    live: list[Ref] = [ref for module in (*modules.values(), *outside) for ref in module.run]
    live += [ref for module in outside for found in module.defined for ref in found.refs]
    for found in (found for module in modules.values() for found in module.defined):
        todo.setdefault(found.ref, []).append(found)
        if found.ref[1] in named or f"{found.shown}.".startswith(given):
            live.append(found.ref)
    seen: set[Ref] = set()
    while live:
        ref = live.pop()
        if ref in seen:
            continue
        seen.add(ref)
        live += resolve(modules, ref)
        live += [inner for found in todo.pop(ref, []) for inner in found.refs]
    return sorted(found.shown for left in todo.values() for found in left)


def resolve(modules: dict[str, Module], ref: Ref) -> set[Ref]:
    """What a module imports stands in another."""
    module = modules.get(ref[0] or "")
    return set() if module is None or ref[1] in module.own else module.imports.get(ref[1], set())
