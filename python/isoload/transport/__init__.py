"""Communication between ranks: a Group for loads and weights, a Dispatcher for rows, and both as a Transport."""

from isoload.transport.collective import CollectiveGroup, await_all
from isoload.transport.dispatcher import Dispatcher, Received
from isoload.transport.exchanges import SendCounts
from isoload.transport.group import DTYPES, STAGES, Call, Group, checksum, error_code
from isoload.transport.row_dispatcher import NodeDispatcher, RowDispatcher
from isoload.transport.transport import CollectiveTransport, LocalGroup, LocalTransport, Transport

__all__ = [
    "DTYPES",
    "STAGES",
    "Call",
    "CollectiveGroup",
    "CollectiveTransport",
    "Dispatcher",
    "Group",
    "LocalGroup",
    "LocalTransport",
    "NodeDispatcher",
    "Received",
    "RowDispatcher",
    "SendCounts",
    "Transport",
    "await_all",
    "checksum",
    "error_code",
]
