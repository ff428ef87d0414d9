"""Help is the commands' own, needs no torch, and lists the names that there are."""

import inspect
import os
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from typer.models import ParameterInfo
from typer.testing import CliRunner

import isoload
from isoload.analysis.batches import ASSIGNMENTS, CALIBRATIONS
from isoload.analysis.prediction import PREDICTIONS
from isoload.analysis.simulate import BASELINE, DEFAULT_POLICIES, SHARED_POLICIES
from isoload.balancing.own_counts import Loads
from isoload.cli import options
from isoload.cli.app import app
from isoload.placement.files import FORMATS
from isoload.placers import PLACERS
from isoload.policies import POLICIES
from support.documents import PLAIN
from support.sweeps import slow

COMMANDS = [command.callback.__name__ for command in app.registered_commands]
HELPS = [
    [],
    ["replay", "--help"],
    *slow(["--help"], *([name, "--help"] for name in COMMANDS if name != "replay")),
]


@pytest.mark.parametrize("words", HELPS, ids=lambda words: words[0] if words else "nothing")
def test_help_is_the_commands_own_and_needs_no_torch(words):
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['isoload', *{words}]; import isoload_command"
    )
    command = [sys.executable, "-c", f"{code}; isoload_command.main()"]
    said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    real = CliRunner().invoke(app, words or ["--help"], env=PLAIN | {"COLUMNS": "80"}, prog_name="isoload")
    assert said.stdout.split() == real.stdout.split() != [], said.stderr


@pytest.mark.slow
def test_what_is_no_help_has_the_whole_package():
    """A word in the place of an option's value is none: this command runs, and ends in its own error."""
    code = "import sys; sys.argv = ['isoload', 'inspect', 'missing.npz', '--json', '--help']\n"
    code += "import isoload_command as c; c.main()"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert said.stderr.startswith("error: missing.npz: No such file or directory"), said.stderr


def test_the_version_needs_no_typer():
    """typer and rich take half a second of processor time, the version a twentieth."""
    code = "import sys; sys.modules['typer'] = None; sys.argv = ['isoload', '--version']; import isoload_command as c"
    said = subprocess.run([sys.executable, "-c", f"{code}; c.main()"], capture_output=True, text=True)
    assert said.stdout == f"isoload {isoload.__version__}\n", said.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_text_is_shown_as_it_was_written(name):
    """Square brackets, too, which rich takes for a style: isoload[report]."""
    (command,) = [each.callback for each in app.registered_commands if each.callback.__name__ == name]
    texts = [inspect.getdoc(command)]
    for hint in get_type_hints(command, include_extras=True).values():
        texts += [part.help for part in get_args(hint) if isinstance(part, ParameterInfo)]
    shown = CliRunner().invoke(app, [name, "--help"], env=PLAIN | {"COLUMNS": "1000"}).stdout
    words = re.sub(r"[\s\u2502]+", " ", shown)
    for text in texts:
        assert " ".join(text.split()) in words


def test_names_in_help_are_those_that_there_are():
    for said, names in (
        (options.POLICIES, POLICIES),
        (options.PLACERS, PLACERS),
        (options.FORMATS, FORMATS),
        (options.ASSIGNMENTS, ASSIGNMENTS),
        (options.CALIBRATIONS, CALIBRATIONS),
        (options.PREDICTIONS, PREDICTIONS),
        (options.LOADS, get_args(Loads)),
    ):
        assert said == ", ".join(names)
    for said, names in (
        (options.DEFAULT_POLICIES, DEFAULT_POLICIES),
        (options.SHARED_POLICIES, SHARED_POLICIES),
    ):
        assert said == ",".join("in-order" if name == BASELINE else name for name in names)
    assert options.BASELINE == BASELINE
