"""Switch: whose choice of replicas stands, isoload's or the engine's, changed while the engine runs.

ISOLOAD_SWITCH names a file that the first rank reads. A flag for each layer lies on the device, where captured graphs
read it: both choices are made, the flag picks one. Between two passes all ranks take the first one's word.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.checks import parse_layers
from isoload.files.reading import open_regular

log = logging.getLogger("isoload")
AGREE_EVERY = 16  # forward passes between two words of the first rank
READ_EVERY = 1.0  # seconds between two readings of the file
STATES = ("off", "on", "shadow")
LONGEST = 1000  # bytes of the file


class Switch:
    """Of one model on one rank; "on" until the file says another.

    Args:
        path: of the file: ``on``, ``off``, ``shadow`` or ``on:layers=0-7,9``, by position. While it is not there, or
            says something else, all stays as it was.
        num_layers: L.
        device: where the engine routes.
        group: the ranks, over gloo; None: this one alone.
        engine: its name.
    """

    def __init__(
        self, path: str, num_layers: int, device: torch.device, group: dist.ProcessGroup | None, engine: str
    ) -> None:
        self.path, self.group, self.engine = Path(path), group, engine
        self.rank = 0 if group is None else dist.get_rank(group)
        # [1 + L] position in STATES, then whose choice stands
        self._code = torch.tensor(parse("on", num_layers))
        with torch.inference_mode(False):  # else only inference could write it
            self.flags = torch.ones(num_layers, dtype=torch.bool, device=device)
        self._layers = list(self.flags.unbind())  # views made once
        self.on = [True] * num_layers  # the flags, for the host
        self._fault, self._next, self._passes = "", 0.0, 0

    @property
    def state(self) -> str:
        return STATES[int(self._code[0])]

    def choose(self, layer: int, ours: Tensor, theirs: Tensor) -> Tensor:
        """[T, K] one of two choices of slots, of ours' dtype: no host wait, in a captured graph too."""
        return torch.where(self._layers[layer], ours, theirs.to(ours.dtype))

    def step_ended(self) -> bool:
        """A forward pass is over, on all ranks, outside of any graph: whether the state has changed, on all alike."""
        self._passes += 1
        if self._passes % AGREE_EVERY:
            return False
        wanted = self._code.clone()
        if self.rank == 0:
            wanted = torch.tensor(self._read())
        if self.group is not None:
            dist.broadcast(wanted, dist.get_global_rank(self.group, 0), group=self.group)
        if torch.equal(wanted, self._code):
            return False
        self._code = wanted
        self.flags.copy_(wanted[1:].bool())
        self.on = self._code[1:].bool().tolist()
        said = f"{self.state}, isoload's on {int(wanted[1:].sum())} of {len(self.flags)} layers"
        log.info(f"isoload {self.engine}: switched to {said}, after pass {self._passes} on rank {self.rank}")
        return True

    def leave(self) -> None:
        """The engine's choice stands in all layers, in captured graphs too; the file is read no more."""
        self.flags.zero_()

    def _read(self) -> list[int]:
        """What the file says; what it said before where it says nothing, or nothing that is a state."""
        before: list[int] = self._code.tolist()
        if time.monotonic() < self._next:
            return before
        self._next = time.monotonic() + READ_EVERY
        fault, found = "", before
        try:
            with open_regular(self.path) as file:  # a pipe would block the engine in its pass
                text = file.read(LONGEST).decode(errors="backslashreplace").strip()
            if text:  # else it is being written
                found = parse(text, len(self.flags))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            fault = str(error)
            if fault != self._fault:  # once
                log.error(f"isoload {self.engine}: ISOLOAD_SWITCH {self.path}: {fault}; {self.state} stays")
        self._fault = fault
        return found


def parse(text: str, num_layers: int) -> list[int]:
    """[1 + L] position in STATES, then 1 for each layer whose replicas isoload chooses."""
    state, _, layers = text.partition(":layers=")
    if state not in STATES or (layers and state != "on") or (not layers and text != state):
        raise ValueError(f"state must be on, off, shadow or on:layers=0-7, got {text!r:.80}")
    chosen = set(parse_layers(layers, num_layers) if layers else range(num_layers if state == "on" else 0))
    return [STATES.index(state), *(int(layer in chosen) for layer in range(num_layers))]
