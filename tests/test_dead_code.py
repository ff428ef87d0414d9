"""Nothing is in the package for its test alone: users, documents, benches and examples reach all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import isoload
from support.liveness import find_dead

ROOT = Path(__file__).parent.parent
# Called by name: a dispatcher's stages by Megatron's MoE layer, Trainer's methods by transformers, a group's by click,
# a registered routing's by vLLM, and is_leaf by torch's optimizers.
CALLED = [
    "isoload.cli.options.Group",
    "isoload.engines.megatron.BalancedTokenDispatcher",
    "isoload.engines.torchtitan.BalancedTokenDispatcher",
    "isoload.engines.huggingface.BalancedTraining",
    "isoload.engines.recorded_skew.Strategy",
    "isoload.weights.storage.ExpertParameter",
]


def documented() -> set[str]:
    """What the documents name as code."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    spans = (span for page in pages for span in re.findall("```.*?```|`[^`\n]+`", page.read_text(), re.S))
    return {word for span in spans for word in re.findall(r"\w+", span)}


@pytest.mark.slow
def test_all_of_the_package_is_reached() -> None:
    users = [
        path for folder in ("bench", "docs", "examples", "kernels") for path in (ROOT / folder).rglob("*.py")
    ]
    users += (ROOT / "python").glob("*.py")
    hooks = {*dir(torch.nn.Module), *dir(torch.autograd.Function)}
    words = documented() | hooks | set(isoload.__all__)
    dead = find_dead(ROOT / "python" / "isoload", users, words, CALLED)
    assert not dead, "nothing but its own test reaches " + ", ".join(dead)


FILES = {
    "__init__.py": "from made.ways import used\n__all__ = ['used', 'renamed']\nBY_NAME = 'by_name'\n",
    "ways.py": """
import made.other
from made.other import LIMIT, helper as aid

def used():
    return aid() + LIMIT + made.other.by_module() + Held().value

def helper():  # the same name as what is used, in a module that does not
    return unseen()

def unseen():  # for a dead one alone
    return 1

def again(n):  # calls itself alone
    return again(n - 1)

@made.other.register
def registered():
    return 0

def by_name():
    return getattr(made, BY_WORD)

BY_WORD = "by_name"
UNREAD: int = 3

class Held:
    value = 1

    def __call__(self):
        return self.called()

    def called(self):
        return 0

    def forgotten(self):
        return UNREAD
""",
    "other.py": """
LIMIT = 2
def helper(): return 1
def by_module(): return 2
def register(function): return function
def renamed(): return 3
class Alone:
    def stage(self): return inner()
def inner(): return 1
""",
}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    for name, text in FILES.items():
        (tmp_path / "made" / name).write_text(text)
    return tmp_path / "made"


def test_names_what_nothing_reaches(made: Path) -> None:
    dead = [
        "made.ways.Held.forgotten",
        "made.ways.UNREAD",
        "made.ways.again",
        "made.ways.helper",
        "made.ways.unseen",
    ]
    alone = ["made.other.Alone", "made.other.Alone.stage", "made.other.inner"]
    words = ["used", "renamed", "by_name", "BY_NAME"]
    assert find_dead(made, [], words) == [*alone, *dead]
    assert find_dead(made, [], words, called=["made.other.Alone"]) == dead
    user = made.parent / "user.py"
    user.write_text("from made.ways import again\nagain(made.forgotten)\n")
    assert find_dead(made, [user], words) == [*alone, *dead[3:]]
