"""The command ``isoload``. Outside of the package, which imports torch: that takes a second, and no help needs it."""

import sys
from importlib.util import find_spec
from types import ModuleType


def main() -> None:
    """Entry point."""
    words = sys.argv[1:]
    try:
        if len(words) <= 2 and words[-1:] in ([], ["--help"]):
            leave_package_empty()
        from isoload import cli

        cli.main()
    except KeyboardInterrupt:  # outside of a command: in an import
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


def leave_package_empty() -> None:
    """Modules of isoload are found, but its __init__ does not run, so torch is not imported."""
    spec = find_spec("isoload")
    assert spec is not None and spec.submodule_search_locations
    package = sys.modules.setdefault("isoload", ModuleType("isoload"))
    package.__path__ = list(spec.submodule_search_locations)
