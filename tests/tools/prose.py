"""List words that the project's prose avoids, and long sentences: ``python tests/tools/prose.py [--long] [FILES]``.

Checked are Markdown outside of code blocks, and in Python docstrings, comments and texts of two words or more. A
finding is a line ``file:line: word: sentence``; the exit status is 1 if a word was found. Long sentences are
printed with ``--long`` and change nothing.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Each pattern with the reason: metaphors, verbs that personify programs, and words that stand for a missing noun.
AVOIDED = {
    r"doors?|houses?|rooms?": "a metaphor: entry point, memory, capacity, space",
    r"at home|(?:stays?|stayed|remains?|keeps? \w+) home|(?:come|comes|go|goes) home": "write: on its own rank",
    r"say|says|said|saying": "programs return, print, raise or record; a page states",
    r"tell|tells|told|hear|hears|heard|asks|asked": "programs return, print, raise, request or record",
    r"knows|knew|believes?|wishes|forgets?|forgot|remembers?|notices?|sees": "programs read, record, detect",
    r"stands?|stood|lies|lay": "write: is, is on, is stored",
    r"held|settles?|settled|feeds?|fed": "write: checked, kept, stored, decided, reads from",
    r"beside|besides": "write: next to, in addition to, compared with",
    r"goes on|go on|comes? back to": "write: continues, returns",
    r"likewise|as before|the others|which one|and so on": "repeat the noun",
    r"alike": "write: the same, equally, in the same way",
    r"anew|thereof|whence|thereby|hereby|whatever|whoever|wherever": "plain English: again, from which, ...",
}
WORD = re.compile(r"\b(" + "|".join(AVOIDED) + r")\b", re.IGNORECASE)
# Uses that are right: a pattern that is removed from the text before it is searched.
ALLOWED = (
    r"https?://\S+",
    r"`[^`]*`",
    r"[Hh]eld[- ]out|hold out",  # data that a fit has not used
    r"[\"']held[\"']|forget\(\)|NOTICE|SAID|class=said|\.said",  # values, functions, files, styles
    r"\b(asked|beside|besides|room|said): ",  # arguments that a docstring explains
    r"which one half|stand-ins?",
)
LONG = 30


def sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*|#] ", text):
        yield from re.split(r"(?<=[.!?:;])\s+", re.sub(r"\s+", " ", paragraph).strip())


def markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) outside of code blocks and HTML comments."""
    code, start, lines = False, 1, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and line.strip() and not line.lstrip().startswith("<!--"):
            start = start if lines else number
            lines.append(line)
            if not line.startswith("|"):
                continue
        if lines:
            yield start, "\n".join(lines)
            lines = []


def python(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings, texts of two words or more, and blocks of comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            words = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value
        else:
            continue
        if len(words.split()) > 1:
            yield node.lineno, words
    block, start, last = "", 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] == last + 1 and token.line.lstrip().startswith("#"):
                block += " " + token.string.lstrip("#! ")
            else:
                if block:
                    yield start, block
                block, start = token.string.lstrip("#! "), token.start[0]
            last = token.start[0]
    if block:
        yield start, block


def findings(path: Path, long: bool) -> Iterator[str]:
    text = path.read_text()
    seen = set()
    for line, words in (markdown if path.suffix == ".md" else python)(text):
        clean = words
        for allowed in ALLOWED:
            clean = re.sub(allowed, "X", clean)
        for sentence in sentences(clean):
            for found in WORD.finditer(sentence):
                if (line, found[0], sentence) not in seen:
                    seen.add((line, found[0], sentence))
                    yield f"{path}:{line}: {found[0]}: {sentence[:160]}"
            if long and len(sentence.split()) > LONG and not sentence.startswith("|"):
                yield f"{path}:{line}: {len(sentence.split())} words: {sentence[:160]}"


def main(arguments: list[str]) -> int:
    long = "--long" in arguments
    files = [Path(name) for name in arguments if name != "--long"]
    if not files:
        files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("python/isoload/**/*.py")]
        files = [path for path in files if path.name != "CHANGELOG.md"]
    found = [line for path in sorted(files) for line in findings(path, long)]
    print("\n".join(found))
    return int(any(": " in line and not re.search(r": \d+ words: ", line) for line in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
