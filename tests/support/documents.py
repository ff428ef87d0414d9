"""Code blocks of a document, and what the commands in them print."""

import re

from typer.testing import CliRunner

from isoload.cli.app import app

PLAIN = {"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "TTY_INTERACTIVE": None, "COLUMNS": None}


def blocks(path, language):
    """Bodies of the fenced blocks of one language ("" = none)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.S | re.M)
    return [body for name, body in fenced if name == language]


def printed(words):
    """What `isoload WORDS` writes to stdout. In this process: importing torch takes longer than most commands."""
    done = CliRunner().invoke(app, words, env=PLAIN)
    assert done.exit_code == 0, f"{words}\n{done.output}"
    return done.stdout
