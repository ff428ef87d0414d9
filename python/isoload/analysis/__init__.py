"""Recorded batches under several policies: cut, placed, planned, routed, counted."""
