"""Files that isoload reads: opened in one place, which refuses pipes and devices, so that no engine waits for one."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from isoload.files import open_regular, read_text

PACKAGE = Path(__file__).parents[2] / "python" / "isoload"
OPENS = {"open", "fdopen", "read_text", "read_bytes", "safe_open", "load_file", "ZipFile", "mmap"}
LOADS = {"load", "fromfile", "memmap", "loadtxt", "genfromtxt"}
LIBRARIES = {"np", "numpy", "torch", "pickle", "json", "tomllib", "yaml"}
ALLOWED = {
    "files.py os.open": "open_regular itself",
    "files.py os.fdopen": "open_regular itself",
    "files.py open": "writes",
    "traces/npz.py new.open": "writes",
    "cli/options.py os.open": "writes to /dev/null",
    "traces/record.py zipfile.ZipFile": "reads what open_regular opened",
    "traces/record.py np.load": "reads what open_regular opened",
    "traces/sglang.py torch.load": "reads what open_regular opened",
    "traces/statistics.py safe_open": "open_regular has opened the file before",
    "engines/huggingface.py torch.load": "reads what open_regular opened",
    "engines/sglang/placement.py torch.load": "reads what open_regular opened",
    "layer/state.py torch.load": "open_regular has opened the file before",
    "weights/checkpoints.py safe_open": "open_regular has opened the file before",
    "times/experts.py read_text": "data of this package",
    "engines/seams.py read_text": "data of this package",
    "transport/deep_ep/transport.py p.read_text": "sources of an installed package",
    "transport/collective.py boot_id.read_text": "of the kernel",
    "transport/collective.py path.open": "writes a new file",
    "weights/pages.py mmap.mmap": "memory without a file",
    "layer/program_state.py torch.load": "reads bytes of a state, as tensors alone",
    "transport/collective.py read_text": "a peer's file, in the trial that its ranks run",
}


def calls(path: Path) -> Iterator[str]:
    """The calls in a module that may open a file, as they are written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in OPENS - {"read_text"}:
            yield node.func.id
        if isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if node.func.attr in OPENS or (owner in LIBRARIES and node.func.attr in LOADS):
                yield f"{owner}.{node.func.attr}".lstrip(".")


def test_no_module_opens_a_file_but_through_files_reading() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} {call}"
        for path in PACKAGE.rglob("*.py")
        if "kernels" not in path.parts
        for call in calls(path)
    }
    assert found == set(ALLOWED)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        for read in (open_regular, read_text):
            with pytest.raises(ValueError, match=f"^{path}: is no regular file$"):
                read(path)
