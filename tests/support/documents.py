"""Code blocks of a document, and what the commands in them print."""

import re
import shlex

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


VALUES = {"NODE_RANK": "0", "HEAD_NODE_IP": "127.0.0.1", "PORT": "5000"}  # the reader's own, in launches


def launches(path, program):
    """Return the command lines of a page that start a program: in fenced blocks, in indented ones and in code spans."""
    text = path.read_text().replace("\\\n", " ")
    found = [line.strip().removeprefix("$ ") for line in text.splitlines() if "`" not in line]
    found += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M))
    return [line for line in found if re.search(rf"\b{re.escape(program)} ", line)]


def launch_words(line):
    """Return the words of a launch as a shell passes them on, with VALUES for the reader's words and variables."""
    names = "|".join(VALUES)
    return shlex.split(
        re.sub(rf"\$\{{({names})\}}|\b({names})\b", lambda name: VALUES[name[1] or name[2]], line)
    )
