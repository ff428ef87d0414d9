"""``python -m isoload`` is the command ``isoload``."""

from isoload_command import main

main()
