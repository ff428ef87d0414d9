"""save_pretrained of a transformers model whose experts lie on the ranks of several processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from isoload.layer.whole import (
    all_processes,
    check_layers,
    is_writer,
    stored_layers,
    whole_state,
    written_aside,
)
from isoload.weights.state import check_whole


def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    push_to_hub: bool = False,
    **how: Any,
) -> None:
    """Write a checkpoint with all experts, which stock transformers loads. All ranks call it together; rank 0 writes.

    Rank 0 needs host memory for all experts, the other ranks for those of one layer. Files appear in the folder once
    all of them are written.

    Args:
        model: a transformers model, see :func:`isoload.balance`.
        save_directory: folder of the checkpoint, made if it does not exist.
        is_main_process: not used where the state is gathered.
        state_dict: a whole state that was gathered before; each process then writes as transformers does.
        push_to_hub: must be False where the state is gathered.
        **how: what else transformers' save_pretrained takes.

    Raises:
        ValueError: on all ranks: the state is one rank's part, or the state cannot be gathered.
        RuntimeError: other ranks have not called it within the timeout of the default process group.
    """
    kind: Any = type(model)  # the instance attribute save_pretrained is this function
    write = kind.save_pretrained
    if state_dict is not None:
        check_whole(state_dict)
        write(model, save_directory, is_main_process, state_dict, push_to_hub, **how)
        return
    processes, layers = all_processes("save_pretrained"), stored_layers(model)
    with processes.agreeing("save_pretrained"):
        check_layers(layers, processes)
        if push_to_hub:
            raise ValueError("push_to_hub must be False over processes: save, then push the folder, got True")
    state = whole_state(model)
    with processes.agreeing("save_pretrained"):
        if is_writer():
            target = Path(save_directory)
            written = target.with_name(f"{target.name}.{os.getpid()}.written")
            with written_aside(written) as part:
                write(model, part, True, state, **how)
            take_files(target, written)


def take_files(target: Path, written: Path) -> None:
    """Move files into a folder, in place of older weights, and remove the folder where they were."""
    target.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in written.iterdir()}
    for old in target.glob("model*.safetensors*"):
        if old.name not in names:
            old.unlink()
    for name in names:
        (written / name).replace(target / name)
    written.rmdir()
