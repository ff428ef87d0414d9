"""Traces of recorded routing, and the files from which they are read and to which they are written."""

from __future__ import annotations

from isoload.traces.identity import Identity
from isoload.traces.npz import write_trace
from isoload.traces.record import Ints, Trace, count_batches, trace_errors
from isoload.traces.recordings import (
    READ_AS,
    check_layers,
    join_batches,
    join_stages,
    joined_trace,
    read_recordings,
    read_trace,
    same_layers,
)
from isoload.traces.routes import read_routes

__all__ = [
    "READ_AS",
    "Identity",
    "Ints",
    "Trace",
    "check_layers",
    "count_batches",
    "join_batches",
    "join_stages",
    "joined_trace",
    "read_recordings",
    "read_routes",
    "read_trace",
    "same_layers",
    "trace_errors",
    "write_trace",
]
