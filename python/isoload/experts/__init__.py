"""Grouped expert compute: the weights of a rank's slots, copies in slot order, grouped GEMMs."""
