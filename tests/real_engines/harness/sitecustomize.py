"""Python imports this file at the start of every process that has this folder on its PYTHONPATH."""

import torchvision_names  # noqa: F401
