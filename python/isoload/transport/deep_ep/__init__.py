"""Dispatch and combine by DeepEP: its buffers take slots as experts."""

from isoload.transport.deep_ep.transport import (
    DeepEPDispatcher,
    DeepEPTransport,
    Package,
    installed,
    shared_buffer,
)

__all__ = ["DeepEPDispatcher", "DeepEPTransport", "Package", "installed", "shared_buffer"]
