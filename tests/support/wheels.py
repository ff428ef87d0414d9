"""Engines' seams in unpacked wheels: their sources are parsed, nothing of them is imported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

from isoload.engines.seams import Seam, hooks_of

BUILD = Path(__file__).parents[2] / "build"

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


class Written:
    """A default value as its source has it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def parameters(node: Definition) -> inspect.Signature:
    """Return names, kinds and defaults as :func:`isoload.engines.seams.bare_signature` does."""
    drop_first = any(ast.unparse(one) == "classmethod" for one in node.decorator_list)
    if isinstance(node, ast.ClassDef):
        node = next(one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
        drop_first = True
    args = node.args
    kinds = [
        (inspect.Parameter.POSITIONAL_ONLY, args.posonlyargs),
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, args.args),
    ]
    positional = [(kind, one) for kind, several in kinds for one in several]
    defaults = [None] * (len(positional) - len(args.defaults)) + [*args.defaults]
    parts = [(kind, one, value) for (kind, one), value in zip(positional, defaults, strict=True)][drop_first:]
    parts += [(inspect.Parameter.VAR_POSITIONAL, args.vararg, None)] if args.vararg else []
    parts += [
        (inspect.Parameter.KEYWORD_ONLY, one, value)
        for one, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    parts += [(inspect.Parameter.VAR_KEYWORD, args.kwarg, None)] if args.kwarg else []
    empty = inspect.Parameter.empty
    return inspect.Signature(
        inspect.Parameter(one.arg, kind, default=empty if value is None else Written(ast.unparse(value)))
        for kind, one, value in parts
    )


def fault(root: Path, seam: Seam, follow: bool = True) -> str:
    """Return the difference of an engine below a folder from a seam, in a few words; empty if there is none."""
    there = [one for path in (seam.target, seam.older) if path and (one := definition(root, path, follow))]
    if not there:
        return f"no `{seam.name}`"
    if seam.kind == "fields":
        field = seam.missing_field(field_names(there[0]))
        return f"no field `{field}` of `{seam.name}`" if field else ""
    return "" if seam.takes(parameters(there[0])) else f"other parameters of `{seam.name}`"


def field_names(record: Definition) -> set[str]:
    """Return the annotated fields, the properties and the methods of a class."""
    annotated = (one for one in record.body if isinstance(one, ast.AnnAssign))
    fields = {one.target.id for one in annotated if isinstance(one.target, ast.Name)}
    return fields | {getattr(one, "name", "") for one in record.body}


def reasons(root: Path, engine: str) -> dict[str, str]:
    """Return by hook the first difference of an engine below a folder; empty: the hook attaches."""
    return {
        hook: next(filter(None, (fault(root, seam) for seam in seams)), "")
        for hook, seams in hooks_of(engine).items()
    }


# By engine its folder below build/, and the package by which a folder is recognised.
UNPACKED = {
    "SGLang": ("sglang", "sglang"),
    "vLLM": ("vllm", "vllm"),
    "Megatron-Core": ("megatron-core", "megatron"),
    "transformers": ("transformers", "transformers"),
    "torchtitan": ("torchtitan", "torchtitan"),
}


def unpacked(engine: str, version: str) -> Path | None:
    """Return the folder into which `make test-wheels` unpacked a version; None: it is not there."""
    folder, package = UNPACKED[engine]
    root = BUILD / folder / version
    return root if (root / package).is_dir() else None


def version_of(root: Path) -> str:
    """Return the version of the only package in a folder, from its metadata."""
    (metadata,) = root.glob("*.dist-info")
    return metadata.name.removesuffix(".dist-info").rpartition("-")[2]
