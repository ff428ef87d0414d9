"""``--plugin FILE.py``: policies and placers of the user's own, registered before a command looks for names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from isoload.files.reading import open_regular


def load_plugins(paths: Sequence[Path] | None) -> None:
    """Run the files, which call register_policy or register_placer.

    Raises:
        ValueError: a name without .py, or a file that fails; naming the file, and the error and its line.
        OSError: a file that cannot be opened.
    """
    for path in paths or ():
        open_regular(path).close()
        name = f"isoload_plugin_{path.stem}"
        spec = spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"plugin must be a Python file, whose name ends in .py, got {str(path)!r}")
        module = module_from_spec(spec)
        sys.modules[name] = module  # where the types of a dataclass's fields are looked up
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ValueError(
                f"{path}: {type(error).__name__}: {error}{_line_of(error, spec.origin)}"
            ) from error


def _line_of(error: Exception, file: str | None) -> str:
    """Return the line of the file at which it failed, where Python knows it."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" (line {line})"
