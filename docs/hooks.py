"""Hooks of mkdocs: the references of commands and of environment variables, written from the code at each build.

A page has ``<!-- generated: NAME -->`` where a reference belongs, and GENERATED its function. Links that leave docs/
become names of files.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from typer.main import get_command
from typer.models import OptionInfo

from isoload.cli.app import app
from isoload.cli.options import MAX_COUNT, ranges
from isoload.engines.settings import COMMON, ROUTING, SGLANG, VLLM, Variable

ROOT = Path(__file__).parent.parent
FOLDERS, SUFFIXES = ("python", "csrc", "bench"), (".py", ".h", ".cuh", ".cpp", ".cu")
TYPES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite a page before mkdocs renders it."""
    markdown = re.sub(r"<!-- generated: (\w+) -->", lambda mark: GENERATED[mark[1]](), markdown)
    return name_files(re.sub(r"^::: (\S+)\{(.+)\}$", _objects, markdown, flags=re.MULTILINE))


def _objects(line: re.Match[str]) -> str:
    """Expand ``::: isoload.{place, plan}`` to the lines of mkdocstrings, one for each object."""
    return "\n".join(f"::: {line[1]}{name}" for name in line[2].split(", "))


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles of Sphinx in docstrings, which mkdocstrings leaves before the names in code."""
    return re.sub(r":(?:class|meth|func|mod|attr|data):<code>[~.]?", "<code>", html)


def name_files(markdown: str) -> str:
    """Replace links to files outside of docs/, which are in the repository and not on the site, by their names."""
    return re.sub(r"\[([^\]\n]*)\]\(\.\./([^)#\s]+)[^)\s]*\)", _name, markdown)


def _name(link: re.Match[str]) -> str:
    text, path = link[1].strip("`"), link[2]
    return f"`{path}`" if path.endswith(text) else f"{link[1]} (`{path}`)"


def commands() -> str:
    """Return a section for each command, with its arguments and options."""
    parsers = get_command(app).commands  # type: ignore[attr-defined]
    runs = [command.callback for command in app.registered_commands]
    return "\n".join(line for run in runs for line in _command(run, parsers[run.__name__].params))


def _command(run: Callable[..., None], parameters: Sequence[Any]) -> Iterator[str]:
    usage, rows = ["isoload", run.__name__], []
    options = {parameter.name: parameter.opts for parameter in parameters}
    for name, hint in get_type_hints(run, include_extras=True).items():
        info = next((part for part in get_args(hint) if hasattr(part, "param_decls")), None)
        if info is None:  # typer's context, or what the function returns
            continue
        default, values = signature(run).parameters[name].default, info.metavar or _type(get_args(hint)[0])
        needed = default is Parameter.empty
        if isinstance(info, OptionInfo):
            names = options[name]
            usage += [f"{names[0]} {values}"] if needed else []
        else:
            names, values = [values], ""
            usage.append(names[0])
        shown = "required" if needed else "" if default is None or default is False else f"`{default}`"
        code = ", ".join(f"`{each}`" for each in names)
        rows.append(f"| {code} | {_cell(values + _bounds(run, name))} | {shown} | {_cell(info.help)} |")
    yield f"\n## isoload {run.__name__}\n\n```text\n{' '.join(usage)} [OPTIONS]\n```\n"
    yield cleandoc(run.__doc__ or "") + "\n\n| | value | default | meaning |\n|---|---|---|---|"
    yield from rows


def _type(kind: Any) -> str:
    """Return a type as help shows it; nothing for an option without a value."""
    if get_origin(kind) in (Union, types.UnionType, list):
        return _type(get_args(kind)[0])
    return TYPES.get(kind, "")


def _bounds(run: Callable[..., None], name: str) -> str:
    if name not in ranges(run):
        return ""
    least, largest = ranges(run)[name]
    return f", at least {least}" if largest == MAX_COUNT else f", {least} to {largest}"


def _cell(text: str) -> str:
    """Return the text of a table's cell, in which no bar ends it and no bracket starts a link."""
    return text.replace("|", "&#124;").replace("[", "&#91;")


# Those that no plug-in for an engine reads.
RUNNING = [
    Variable(
        "ISOLOAD_CHECK",
        "0",
        meaning="check values on a GPU before each op, and wait for them; graphs are not captured",
    ),
    Variable(
        "ISOLOAD_MAX_TRACE_BYTES",
        "1073741824",
        "bytes",
        "largest size of a trace's arrays that a reader accepts",
    ),
    Variable("ISOLOAD_PDL", "1", meaning="0: CUDA kernels start one after another, to look for a fault"),
]
BUILDING = [
    Variable(
        "ISOLOAD_CUDA",
        meaning="1: build the CUDA ops for any torch; 0: never; empty: where nvcc and a CUDA build of torch exist",
    ),
    Variable(
        "ISOLOAD_CUDA_ARCH",
        "",
        "sm_90, ...",
        "build for one GPU architecture, in a fraction of the time; empty: for all",
    ),
    Variable("ISOLOAD_CXXFLAGS", "", "flags", "further flags of the C++ compiler"),
    Variable(
        "ISOLOAD_OPS",
        "",
        "in-place",
        "in-place: install without compiling, because build_ext --inplace has compiled the ops",
    ),
    Variable(
        "ISOLOAD_COMMIT", "", "text", "benchmarks: the commit to record in a copy without a git repository"
    ),
]


def plugin_variables() -> str:
    """Return the table of the variables of the plug-ins for SGLang and vLLM."""
    return _variables([SGLANG, VLLM, *COMMON, ROUTING])


def _variables(variables: Sequence[Variable]) -> str:
    """Return a table of variables, each with the files that read it."""
    lines = ["| name | values | default | meaning | read in |", "|---|---|---|---|---|"]
    for name, default, values, meaning in variables:
        files = ", ".join(f"`{path.removeprefix('python/')}`" for path in readers(name))
        shown = f"`{default}`" if default else "empty"
        lines.append(f"| `{name}` | {_cell(values)} | {shown} | {_cell(meaning)} | {files} |")
    return "\n".join(lines)


def readers(name: str) -> list[str]:
    """Return the files that read a variable from the environment, by their paths in the repository."""
    read = re.compile(rf'(?:getenv\(|environ(?:\.get\(|\[)|Variable\(|asked\(|_NAME = )\s*"{name}"')
    files = [ROOT / "setup.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))]
    sources = [path for path in files if path.suffix in SUFFIXES]
    return sorted(str(path.relative_to(ROOT)) for path in sources if read.search(path.read_text()))


GENERATED = {
    "commands": commands,
    "plugin_variables": plugin_variables,
    "running_variables": lambda: _variables(RUNNING),
    "building_variables": lambda: _variables(BUILDING),
}
