"""Hooks of mkdocs: links that leave docs/ become names of files."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite a page before mkdocs renders it."""
    return name_files(markdown)


def name_files(markdown: str) -> str:
    """Replace links to files outside of docs/, which are in the repository and not on the site, by their names."""
    return re.sub(r"\[([^\]\n]*)\]\(\.\./([^)#\s]+)[^)\s]*\)", _name, markdown)


def _name(link: re.Match[str]) -> str:
    text, path = link[1].strip("`"), link[2]
    return f"`{path}`" if path.endswith(text) else f"{link[1]} (`{path}`)"
