"""The reference pages have every command, option, environment variable and public name; names that docs use exist."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.engines.settings import COMMON, Settings
from isoload.files import MAX_ARRAYS
from support.documents import PLAIN

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COMMANDS = [command.callback.__name__ for command in app.registered_commands]
C_SOURCES, SCRIPTS = (".h", ".cuh", ".cpp", ".cu"), (".py", ".sh")
MACRO = re.compile(r"(?:#\s*(?:define|undef|ifdef|ifndef|if)|defined\()\s*(ISOLOAD_\w+)")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    yield import_module("hooks")
    sys.modules.pop("hooks")


def rendered(hooks: Any, page: str) -> str:
    """A page as mkdocs gets it."""
    return hooks.on_page_markdown((DOCS / page).read_text())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_on_its_page(hooks: Any, name: str) -> None:
    """Compared with what --help prints, which the page is not made from."""
    sections = re.split(r"^## isoload ", rendered(hooks, "cli.md"), flags=re.M)
    (section,) = [text for text in sections if text.startswith(f"{name}\n")]
    printed = CliRunner().invoke(app, [name, "--help"], env=PLAIN | {"COLUMNS": "1000"}).stdout
    options = {*re.findall(r"^[│*\s]*(--[\w-]+)", printed, re.M)} - {"--help"}
    assert len(options) > 1 and options == {*re.findall(r"^\| `(--[\w-]+)`", section, re.M)}
    (usage,) = re.findall(rf"isoload {name} .*(?=\n```)", section)
    for argument in re.findall(r"^[│*\s]*\w+\s+(\[?[A-Z|]+[A-Z.\]|]*)", printed, re.M):
        assert argument in usage and f"| `{argument}`" in section, argument
    for row in re.findall(r"^\|.*", section, re.M):
        assert re.sub(r"`.*?`", "", row).count("|") == 5, "a bar in a text ends its cell"


def test_no_command_is_left_out(hooks: Any) -> None:
    assert (
        re.findall(r"^## isoload (\w+)$", rendered(hooks, "cli.md"), re.M) == COMMANDS and len(COMMANDS) == 9
    )


def used_variables() -> set[str]:
    """Return the ISOLOAD_ names of all sources that are no macros of C."""
    found = set(re.findall(r"\bISOLOAD_[A-Z_]*[A-Z]\b", (ROOT / "setup.py").read_text()))
    macros = {"ISOLOAD_WITH_CUDA"}  # setup.py defines it
    for folder in ("python", "csrc", "bench", "kernels"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in C_SOURCES:
                macros |= {*MACRO.findall(path.read_text())}
            if path.suffix in (*C_SOURCES, *SCRIPTS):
                found |= {*re.findall(r"\bISOLOAD_[A-Z_]*[A-Z]\b", path.read_text())}
    return found - (macros - {"ISOLOAD_OPS"})  # setup.py reads a variable of this name


def test_every_variable_is_on_its_page(hooks: Any) -> None:
    rows = re.findall(
        r"^\| `(ISOLOAD_\w+)` \|(.*)\|(.*)\|(.*)\|(.*)\|$", rendered(hooks, "environment.md"), re.M
    )
    assert len(rows) == len({row[0] for row in rows}) > 20
    assert {row[0] for row in rows} == used_variables()
    for name, values, default, meaning, files in rows:
        assert values.strip() and default.strip() and len(meaning) > 20, name
        assert files.strip(), f"no source reads {name}"
        for path in re.findall(r"`(.+?)`", files):
            assert (ROOT / path).exists() or (ROOT / "python" / path).exists(), path


def test_defaults_on_the_page_are_those_of_the_code(hooks: Any) -> None:
    read, variables = Settings.read({}), {variable.name: variable for variable in COMMON}
    for field in fields(Settings):
        name = {"check_weights": "CHECK_WEIGHTS", "report_seconds": "REPORT_SECONDS"}.get(
            field.name, field.name.upper()
        )
        default = variables[f"ISOLOAD_{name}"].default
        value = getattr(read, field.name)
        assert default == (
            "" if value is None else f"{value:g}" if type(value) in (bool, float) else str(value)
        )
        assert field.default is MISSING or field.default == value
    assert f"| `{MAX_ARRAYS}` |" in rendered(hooks, "environment.md")


def resolve(name: str) -> Any:
    """Return what a dotted name names, a module or something in one."""
    first, *rest = name.split(".")
    value, path = import_module(first), first
    for part in rest:
        path += f".{part}"
        value = getattr(value, part) if hasattr(value, part) else import_module(path)
    return value


def test_every_public_name_is_in_the_api_reference(hooks: Any) -> None:
    targets = re.findall(r"^::: (\S+)$", rendered(hooks, "api.md"), re.M)
    for target in targets:
        if not target.startswith(("isoload.engines.megatron", "isoload.engines.torchtitan")):  # not installed
            resolve(target)
    assert len(targets) == len({*targets})
    assert [t.removeprefix("isoload.") for t in targets if t.count(".") == 1] == [*isoload.__all__, "ops"]


@pytest.mark.parametrize("name", [name for name in isoload.__all__ if name not in ("PLACERS", "POLICIES")])
def test_a_public_name_and_its_methods_are_described(name: str) -> None:
    value = getattr(isoload, name)
    members = vars(value).items() if isinstance(value, type) else ()
    methods = {f"{name}.{key}": each for key, each in members if callable(each) and key[0] != "_"}
    assert [key for key, each in {name: value, **methods}.items() if not inspect.getdoc(each)] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_names_of_modules_that_a_page_uses_exist(page: Path) -> None:
    text = re.sub(r"isoload\.(__all__|engines\.(megatron|torchtitan|sglang|vllm)\S*)", "", page.read_text())
    for name in {*re.findall(r"(?<![\w/.-])isoload(?:\.[A-Za-z_]\w*)+", text)}:
        if name.rpartition(".")[2] not in ("json", "py", "npz"):
            resolve(name)


def test_links_out_of_the_docs_become_names(hooks: Any) -> None:
    text = "See [CONTRIBUTING.md](../CONTRIBUTING.md), [the matrix](../bench/README.md#on-gpus) and [here](index.md)."
    assert hooks.name_files(text) == (
        "See `CONTRIBUTING.md`, the matrix (`bench/README.md`) and [here](index.md)."
    )


def test_roles_of_docstrings_are_dropped(hooks: Any) -> None:
    assert hooks.on_page_content("see :class:<code>~isoload.MoE</code>") == "see <code>isoload.MoE</code>"
