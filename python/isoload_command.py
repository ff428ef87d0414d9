"""The command ``isoload``, outside of the package: ``python -m isoload`` and the entry point start it alike."""

import sys


def main() -> None:
    """Entry point."""
    try:
        from isoload.cli import main as run

        run()
    except KeyboardInterrupt:  # outside of a command: in an import
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
