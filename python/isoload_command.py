"""The command ``isoload``, outside of the package: ``python -m isoload`` and the entry point start it alike."""


def main() -> None:
    """Entry point."""
    from isoload.cli import main as run

    run()
