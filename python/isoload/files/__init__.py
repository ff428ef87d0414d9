"""Files from anywhere and files of ours: read within bounds, written whole or not at all."""
