"""isoload inside of serving engines: one folder per engine, and beside them what engines have in common."""
