"""DeepEP as a dispatcher: its buffers take slots as experts, and keep what combine and backward need."""

from isoload.transport.deep_ep.dispatcher import DeepEPDispatcher
from isoload.transport.deep_ep.packages import Package, installed
from isoload.transport.deep_ep.transport import DeepEPTransport, shared_buffer

__all__ = ["DeepEPDispatcher", "DeepEPTransport", "Package", "installed", "shared_buffer"]
