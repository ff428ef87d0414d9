"""Code blocks of a document."""

import re


def blocks(path, language):
    """Bodies of the fenced blocks of one language ("" = none)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.S | re.M)
    return [body for name, body in fenced if name == language]
