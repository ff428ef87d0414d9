"""The records that all ranks agree about: placement, its layers on a device, plan."""
