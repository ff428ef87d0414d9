"""Which DeepEP is installed, read from its files: importing one starts its compiler and needs a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoload.wording import not_one_of

MODULES = ("deep_ep", "deep_ep_v25")
BUFFERS = ("EPBuffer", "ElasticBuffer", "Buffer")  # the first that is there is used


@dataclass(frozen=True)
class Package:
    """An installed DeepEP: its module, its distribution and version, the buffers it has, whether it moves weights."""

    module: str
    distribution: str
    version: str
    buffers: tuple[str, ...]
    borrows: bool

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed() -> list[Package]:
    """The packages that are there, that with the preferred buffer first; one without buffers is not DeepSeek's."""
    found = list(_read(MODULES))
    return sorted(found, key=lambda p: min(map(BUFFERS.index, p.buffers), default=len(BUFFERS)))


def load_buffer(name: str | None = None) -> Any:
    """The class of a buffer, imported.

    Args:
        name: in BUFFERS; None = the preferred one of what is installed.

    Raises:
        ValueError: if no installed package has it.
        RuntimeError: if the package does not start here; its own error says why.
    """
    if name is not None and name not in BUFFERS:
        raise ValueError(not_one_of("kind", BUFFERS, name))
    for package in installed():
        wanted = name or next(iter(package.buffers), None)
        if wanted in package.buffers:
            return getattr(_start(package), str(wanted))
    there = ", ".join(f"{p} with {', '.join(p.buffers) or 'no buffer'}" for p in installed()) or "none"
    raise ValueError(f"DeepEP must be installed with {name or ' or '.join(BUFFERS)}, got {there}")


def _start(package: Package) -> Any:
    try:
        module = importlib.import_module(package.module)
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise RuntimeError(f"{package} does not start here: {type(error).__name__}: {error}") from error
    bits = getattr(module, "topk_idx_t", None)
    if str(bits) not in ("torch.int64", "None"):
        raise ValueError(f"DeepEP must be built with topk_idx_t of torch.int64, got {bits} in {package}")
    return module


def _read(modules: tuple[str, ...]) -> Iterator[Package]:
    for module in modules:
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            continue
        sources = [p.read_text() for p in Path(next(iter(spec.submodule_search_locations))).rglob("*.py")]
        text = "\n".join(sources)
        buffers = tuple(name for name in BUFFERS if re.search(rf"^class {name}\b", text, re.M))
        written = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.M)
        name, version = module, written.group(1) if written else "of unknown version"
        if names := importlib.metadata.packages_distributions().get(module):
            name, version = names[0], importlib.metadata.version(names[0])
        borrows = "EPBuffer" in buffers and "def lb_prefetch_weights" in text
        yield Package(module, name, version, buffers, borrows)
