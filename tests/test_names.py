"""No variable or parameter of isoload is a function word, so that an expression can be read without its assignment."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "python" / "isoload"
WORDS = {
    "of", "found", "given", "held", "made", "kept", "own", "here", "word", "rest", "told", "seen",
    "each", "both", "one", "such", "most",
}  # fmt: skip
# Keyword arguments of the dispatchers' protocol: the rank's own part of the sums.
PUBLIC = {("transport", "own")}


def test_no_name_is_a_function_word() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).with_suffix("")
        for node in ast.walk(ast.parse(path.read_text())):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.arg if isinstance(node, ast.arg) else node.id if stored else ""
            if name in WORDS and (module.parts[0], name) not in PUBLIC:
                wrong.append(f"{module}:{node.lineno} {name}")
    assert not wrong
