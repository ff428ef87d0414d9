"""The command ``isoload``, outside of the package: ``python -m isoload`` and the entry point start it alike."""

import sys


def main() -> None:
    """Entry point."""
    if sys.argv[1:] == ["--version"]:  # without what other options need, which takes half a second
        from isoload import __version__

        print(f"isoload {__version__}")
        return
    try:
        from isoload.cli import main as run

        run()
    except KeyboardInterrupt:  # outside of a command: in an import
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
