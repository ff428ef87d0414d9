"""What holds of every page: well-formed HTML without scripts, that loads nothing and says all figures."""

from __future__ import annotations

import json
import re
import struct
import zlib
from html.parser import HTMLParser
from typing import Any

import numpy as np

EMPTY = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Collects a page's tags and words; every tag that is opened must be closed, in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open[-3:])

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read_page(text: str) -> Reader:
    """A page, after the checks that hold of all."""
    assert text.startswith("<!DOCTYPE html>")
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "image", "use", "base"}
    for tag, attributes in reader.tags:
        assert not {"src", "href", "xlink:href", "srcset", "action"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes), attributes
    assert not re.search(r"@import|url\(|@font-face", text)
    assert "prefers-color-scheme:dark" in text and "@media print" in text
    pictures = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert pictures and all(of["role"] == "img" and of["aria-label"] for of in pictures)
    assert len(pictures) == sum(tag == "figure" for tag, _ in reader.tags)
    assert (
        len(pictures) <= sum(tag == "details" for tag, _ in reader.tags) - 1
    )  # a table behind each, all figures
    for tag, attributes in reader.tags:  # no colour that one of the two schemes cannot be read in
        for name in ("fill", "stroke"):
            value = attributes.get(name)
            assert value is None or re.fullmatch(r"none|transparent|var\(--\w+\)", value), (tag, attributes)
    return reader


def missing(figures: Any, reader: Reader) -> list[str]:
    """Numbers and words of plain values that the page does not have, each number as JSON writes it."""
    words = " ".join(reader.words)
    numbers = set(re.findall(r"[-+.\w]+", words))
    return [
        leaf
        for leaf in _leaves(figures)
        if (json.dumps(leaf)[1:-1] not in words if isinstance(leaf, str) else json.dumps(leaf) not in numbers)
    ]


def _leaves(figures: Any) -> list[Any]:
    if isinstance(figures, dict | list):
        inner = figures.values() if isinstance(figures, dict) else figures
        return [leaf for value in inner for leaf in _leaves(value)]
    return [] if figures is None or isinstance(figures, bool) else [figures]


def read_png(data: bytes) -> tuple[int, tuple[int, ...], float]:
    """Of a PNG with 8 bits a channel: its width, the colour of its corner, and the part of its bytes that differ from
    what their neighbours let expect, which is 0 in an empty picture."""
    at, packed = 8, b""
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
        packed += body if kind == b"IDAT" else b""
        at += size + 12
    assert depth == 8
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, -1)
    return width, tuple(rows[0, 1:4].tolist()), float((rows[1:, 1:] > 0).mean())
