"""isoload inside of other programs: huggingface, and a folder per serving engine; beside them what engines share."""
