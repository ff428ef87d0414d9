"""``python -m isoload`` is the command ``isoload``."""

from isoload.cli import main

main()
