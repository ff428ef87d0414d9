"""The built site (`make docs`): no network is needed, links and pictures exist, the search has every page."""

from __future__ import annotations

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import isoload

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "docs"
PAGES = sorted(path.name for path in SITE.glob("*.html"))
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """Tags with their attributes, and the ids that links may name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(path.read_text())
        self.ids = {attributes.get("id") or attributes.get("name") for _, attributes in self.tags}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))


@cache
def read(name: str) -> Page:
    return Page(SITE / name)


def test_every_page_is_built() -> None:
    sources = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {name.removesuffix(".html") for name in PAGES} == sources | {"404"}
    assert not list(SITE.rglob("*.py")) and not list(SITE.rglob("*.md"))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_nothing_from_a_network(name: str) -> None:
    for tag, attributes in read(name).tags:
        assert not re.match(r"(https?:)?//", attributes.get(LOADED.get(tag, ""), "")), (tag, attributes)
        assert "mermaid" not in attributes.get("class", ""), "the theme loads its script from a network"
        assert "url(" not in attributes.get("style", "")


def test_styles_load_nothing_from_a_network() -> None:
    styles = [path.read_text() for path in SITE.rglob("*.css")]
    styles += re.findall(r"<style>(.*?)</style>", "".join((SITE / name).read_text() for name in PAGES), re.S)
    assert len(styles) > 2
    assert [s for s in styles if re.search(r"(@import|url\()\s*[\"']?(https?:)?//", s)] == []


@pytest.mark.parametrize("name", sorted({*PAGES} - {"404.html"}))  # a server shows 404.html under any address
def test_links_scripts_and_pictures_exist(name: str) -> None:
    for tag, attributes in read(name).tags:
        target = attributes.get("href" if tag == "a" else LOADED.get(tag, ""), "")
        if not target or re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = SITE / unquote(path or name)
        assert found.is_file() and found.is_relative_to(SITE), target
        if anchor and found.suffix == ".html":
            assert unquote(anchor) in read(found.name).ids | {"__skip"}, target


def test_search_has_every_page_and_needs_no_server() -> None:
    index = json.loads((SITE / "search" / "search_index.json").read_text())
    assert {row["location"].partition("#")[0] for row in index["docs"]} == {*PAGES} - {"404.html"}
    assert (SITE / "search" / "search_index.js").read_text().startswith("var __index = ")
    for name in PAGES:
        assert any(of.get("src", "").endswith("assets/iframe-worker.js") for _, of in read(name).tags)


def test_references_were_generated() -> None:
    assert not any("generated:" in (SITE / name).read_text() for name in PAGES)
    assert {f"isoload.{name}" for name in isoload.__all__} <= read("api.html").ids
    assert not re.search(r":(class|meth|func|mod|attr|data):<", (SITE / "api.html").read_text())
    assert {"isoload-replay", "isoload-doctor"} <= read("cli.html").ids


def test_the_build_is_strict() -> None:
    """With -q mkdocs counts no warning, and strict lets every broken link pass."""
    commands = (ROOT / "Makefile").read_text().split("\ndocs: ")[1].split("\n\n")[0]
    assert "$(DOCS) build\n" in commands
    assert "\nstrict: true\n" in (ROOT / "mkdocs.yml").read_text()
