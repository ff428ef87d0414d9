"""Placement: which expert's weights are in which slot; its layers on a device; placement files."""
