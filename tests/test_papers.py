"""bench/paper_tables.md: what its tables name exists, and scripts take their commands. Nothing is run but parsers."""

import ast
import importlib
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from isoload import PLACERS, POLICIES
from isoload.cli.app import app
from isoload.placers import parse_placer
from isoload.policies import parse_policy
from isoload.policies.base import PRESETS
from support.processes import run_program

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "bench" / "paper_tables.md").read_text()
PYTHONS = ("python", ".venv-sglang/bin/python")  # the latter is that of `make test-sglang`
SPAN = re.compile(r"`([^`]+)`")


def tables(generated):
    """{section: rows of cells}, without the head: of the generated table, or of the table of algorithms."""
    found = {}
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        title, body = section.split("\n", 1)
        by_hand, figures = body.split("<!-- table: ")
        lines = re.findall(r"^\| (.*) \|$", figures if generated else by_hand, re.M)
        found[title] = [line.split(" | ") for line in lines[1:]]  # the rule below the head has no spaces
    return found


ROWS = [row for rows in tables(False).values() for row in rows]
CLAIMS = [row for rows in tables(True).values() for row in rows]
COMMANDS = [span for row in [*ROWS, *CLAIMS] for span in SPAN.findall(row[-1])]
UNLICENSED = ("dsv3_sglang_longin", "glm52_domains_a", "gemma4_26b_themes", "olmoe_mmlu_small", "switch128")
NOT_IN_A_CLONE = {
    "bench_craft": UNLICENSED[0],
    "bench_rebalance": UNLICENSED[1],
}  # scripts that need these files
HEADLINES = (  # of the abstracts, the text and the tables
    *("1.14x", "1.2x", "27x", "7.25x", "7.5x", "-29 %", "1.42x", "75 %", "10 s", "-46 %", "1.65x"),
    *("+7.34 %", "+4.92", "+4.66", "+2.52", "3.79x", "-75.5 %", "-42.2", "-43.3", "+17.7 %", "-66.5"),
    *("4.6x", "6.11x", "5x less", "1.88x", "1.25x", "20 %", "+19.2 %", "-27 %", "-12.7 %", "91.7 %", "10.99"),
)


def lookup(name):
    """What a dotted name stands for: a module, or an attribute of one."""
    module, *rest = name.split(".")
    found = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        if not hasattr(found, part):
            importlib.import_module(module)
        found = getattr(found, part)
    return found


def check_call(text):
    """A dotted name, with keywords in brackets that its signature has."""
    found = ast.parse(text, mode="eval").body
    if not isinstance(found, ast.Call):
        lookup(text)
        return
    taken = inspect.signature(lookup(ast.unparse(found.func))).parameters
    unknown = [word.arg for word in found.keywords if word.arg not in taken]
    assert not unknown and not found.args, f"takes no {unknown}"


def check_spec(text):
    """A policy or placer with its options; `grace` is both, so one of the two must take them."""
    if text in PRESETS:
        return None
    name, refused = text.split(":")[0], ["neither a policy nor a placer"]
    for registry, parse in ((POLICIES, parse_policy), (PLACERS, parse_placer)):
        if name in registry:
            try:
                return parse(text)
            except ValueError as error:
                refused.append(str(error))
    raise AssertionError(refused[-1])


def check_name(span, row):
    if span.startswith("isoload."):
        check_call(span)
    elif span.startswith("--"):  # SGLang's
        pages = [(ROOT / "docs" / name).read_text() for name in ("sglang.md", "sglang-policies.md")]
        assert span in "".join(pages), "not in docs/sglang.md or docs/sglang-policies.md"
    elif "/" in span:
        assert (ROOT / span).exists(), "no such path"
    elif "=" in span and ":" not in span:  # an option of a policy or placer of the same row
        names = {spec.split(":")[0] for spec in SPAN.findall(row)} & {*POLICIES, *PLACERS}
        assert any(not faults_of(check_spec, [f"{name}:{span}"]) for name in names), (
            "nothing in the row takes it"
        )
    else:
        check_spec(span)


def faults_of(check, spans, *more):
    found = []
    for span in spans:
        try:
            check(span, *more)
        except Exception as error:
            found.append(f"`{span}`: {error}")
    return found


def test_every_paper_has_a_table_of_whole_rows():
    for generated, width, least in ((False, 4, 8), (True, 5, 8)):
        found = tables(generated)
        assert list(found) == ["CRAFT", "Waterfill and LPLB", "GRACE-MoE", "LLEP", "Libra"]
        for title, rows in found.items():
            assert least <= len(rows) <= 24, title
            for row in rows:
                assert len(row) == width and all(row[:2]) and row[-1], row


def test_every_row_has_a_command_that_runs_in_a_clone_or_names_what_it_needs():
    for row in [*ROWS, *CLAIMS]:
        command, _, needed = row[-1].partition("needs ")
        assert needed or re.fullmatch(r"`[^`]+`", command), row
        named = [name for name in UNLICENSED if name in row[-1]]
        assert not named or needed, f"{named} is not in a clone: {row}"
        for script, trace in NOT_IN_A_CLONE.items():
            assert script not in command or trace in needed, row


def test_an_empty_cell_needs_something():
    for row in CLAIMS:
        assert row[2].strip() or "needs" in row[-1] or "--times" in row[-1], row


def test_every_headline_number_has_a_row():
    figures = " ".join(row[1] for row in CLAIMS)
    assert [number for number in HEADLINES if number not in figures] == []


def test_names_exist():
    faults = []
    for row in ROWS:
        here = " | ".join(row[:3])
        faults += faults_of(check_name, SPAN.findall(here), here)
    assert not faults, "\n".join(faults)


def check_command(text):
    """One that a parser of this process can judge; scripts are parsed in test_scripts_take_their_options."""
    program, *words = shlex.split(text)
    if program == "isoload":
        command = typer.main.get_command(app).commands[words[0]]
        given = command.make_context(words[0], words[1:]).params
        assert all(Path(ROOT / word).exists() for word in words if "/" in word), "no such trace"
        if given.get("placer"):
            parse_placer(given["placer"])
        for policy in (given.get("policies") or "").split(","):
            assert not policy or parse_policy(policy)
    elif program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M), "no such target"
    elif program == "pytest":
        source = (ROOT / words[0]).read_text()
        assert words[1:] == [] or words[1] == "-k", "only -k"
        assert not words[1:] or re.search(rf"^def test_\w*{words[2]}", source, re.M), "-k finds no test"
    else:
        assert program in PYTHONS and (ROOT / words[0]).exists(), "no such script"


def test_commands_exist():
    faults = faults_of(check_command, COMMANDS)
    assert len(COMMANDS) > 50 and not faults, "\n".join(faults)


PARSE = """
import argparse, importlib.util, json, sys
from unittest.mock import MagicMock
sys.path.insert(0, {root!r} + "/bench")
if importlib.util.find_spec("highspy") is None:  # of the extra `bench`; nothing of it is called
    sys.modules["highspy"] = MagicMock()
whole = argparse.ArgumentParser.parse_args

class Parsed(BaseException):
    pass

def parse_only(parser, *args, **kwargs):
    whole(parser, *args, **kwargs)
    raise Parsed

argparse.ArgumentParser.parse_args = parse_only
faults = []
for script, *words in {commands!r}:
    sys.argv = [script, *words]
    folder, name = script.rsplit("/", 1)
    sys.path.insert(0, {root!r} + "/" + folder)
    try:
        importlib.import_module(name.removesuffix(".py")).main()
        faults.append(script + ": parsed nothing")
    except Parsed:
        pass
    except (Exception, SystemExit) as error:
        faults.append(" ".join([script, *words]) + ": " + repr(error))
print(json.dumps(faults))
"""


def test_scripts_take_their_options(tmp_path):
    """Each script's own parser, in a process apart: some benches register policies."""
    scripts = [shlex.split(command)[1:] for command in {*COMMANDS} if command.split()[0] in PYTHONS]
    parsing = [words for words in scripts if "parser.parse_args()" in (ROOT / words[0]).read_text()]
    status, said = run_program(PARSE.format(root=str(ROOT), commands=parsing), tmp_path)
    assert status == 0, said
    faults = json.loads(said.strip().splitlines()[-1])
    assert len(parsing) > 10 and not faults, "\n".join([*faults, said])
    assert all(len(words) == 1 for words in scripts if words not in parsing)  # these have no options


@pytest.mark.parametrize("script", sorted(set(re.findall(r"bench/(bench_\w+)\.py", " ".join(COMMANDS)))))
def test_a_bench_that_is_named_has_run(script):
    """Its results are kept."""
    stems = (script, script.removeprefix("bench_"))
    assert any(list((ROOT / "bench" / "results").glob(f"{stem}*")) for stem in stems)
