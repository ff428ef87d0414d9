"""Transports: how loads and rows travel between the ranks. One protocol, one suite that all of them pass."""

from isoload.transport.agreement import STAGES, error_code
from isoload.transport.base import Transport
from isoload.transport.collective import CollectiveTransport
from isoload.transport.local import LocalTransport
from isoload.transport.records import Handle, Received, Traffic

__all__ = [
    "STAGES",
    "CollectiveTransport",
    "Handle",
    "LocalTransport",
    "Received",
    "Traffic",
    "Transport",
    "error_code",
]
