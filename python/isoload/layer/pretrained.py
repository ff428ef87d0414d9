"""save_pretrained of a transformers model whose experts lie on the ranks of several processes."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from isoload.files.reading import open_regular
from isoload.layer.whole import (
    all_processes,
    check_layers,
    is_writer,
    stored_layers,
    whole_parts,
    written_aside,
)
from isoload.transport import Call
from isoload.weights.checkpoints import FileTensors
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

    All ranks need host memory for the experts of one layer. Each layer's experts have files of their own, of at most
    ``max_shard_size``. Files appear in the folder once all of them are written.

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
        if is_writer():
            check_folder(Path(save_directory))
    target = Path(save_directory)
    written = target.with_name(f"{target.name}.{os.getpid()}.written")
    call = Call(
        processes, "save_pretrained"
    )  # a failure of the writer waits: the other ranks are in exchanges
    with ExitStack() as aside:
        parts: list[Path] = []
        for number, part in enumerate(whole_parts(model)):
            with call:
                if is_writer() and call.failure is None:
                    folder = (
                        aside.enter_context(written_aside(written)) if not parts else parts[0] / str(number)
                    )
                    write(model, folder, True, part, **how)
                    parts.append(folder)
        with processes.agreeing("save_pretrained"):
            call.raise_failure()
            if is_writer():
                join_parts(parts, how.get("variant"))
                aside.close()
                take_files(target, written)


def check_folder(target: Path) -> None:
    """Raise ValueError for a file in the place of the folder."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"save_directory must be a folder, got a file: {target}")


def join_parts(parts: list[Path], variant: str | None) -> None:
    """Move the weights of all parts into the folder of the first one, under the names and with the index of one
    checkpoint."""
    stem = "model" if variant is None else f"model.{variant}"
    files = [file for part in parts for file in sorted(part.glob(f"{stem}*.safetensors"))]
    weight_map: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files):
        name = f"{stem}-{number + 1:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(FileTensors(file).keys(), name)
        with open_regular(file) as opened:
            header = int.from_bytes(opened.read(8), "little")
        size += file.stat().st_size - 8 - header
        file.rename(parts[0] / f"{name}.new")  # a part of several files has such names, too
    for file in list(parts[0].glob("*.new")):
        file.rename(file.with_suffix(""))
    for part in parts[1:]:
        shutil.rmtree(part)
    index = parts[0] / (
        "model.safetensors.index.json" if variant is None else f"model.safetensors.index.{variant}.json"
    )
    content = {"metadata": {"total_size": size}, "weight_map": weight_map}
    index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
