"""DeepEP as a dispatcher: its buffers take slots as experts, and keep what combine and backward need."""

from isoload.transport.deep_ep.transport import (
    DeepEPDispatcher,
    DeepEPTransport,
    Package,
    installed,
    shared_buffer,
)

__all__ = ["DeepEPDispatcher", "DeepEPTransport", "Package", "installed", "shared_buffer"]
