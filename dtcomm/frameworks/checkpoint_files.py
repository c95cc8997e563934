"""The files of compression state in a framework's checkpoint: one for each rank, because residuals differ.

A checkpoint folder has a folder ``dtcomm`` with the files ``rank0-of-2.pt``, ``rank1-of-2.pt``, ..., which hold what
``state_dict()`` returned. Folders may be anything that fsspec opens; local files are replaced atomically.
"""

from __future__ import annotations

import io
import logging
import os
import re
from typing import Any

import fsspec
import torch
import torch.distributed as dist

from dtcomm.compress.checkpoint import Compressor, rank_and_size

_FILE = re.compile(r"rank(\d+)-of-(\d+)\.pt")

_log = logging.getLogger("dtcomm")


def save(state: Compressor, folder: str) -> None:
    """Write this rank's state; rank 0 removes the files of other numbers of ranks, left by an earlier run.

    Args:
        state: The compressor.
        folder: The folder of the files, which is created.
    """
    rank, size = rank_and_size()
    packed = io.BytesIO()
    torch.save(state.state_dict(), packed)
    files, path = fsspec.core.url_to_fs(folder)
    files.makedirs(path, exist_ok=True)
    target = f"{path}/{_name(rank, size)}"
    local = "file" in files.protocol
    with files.open(f"{target}.new" if local else target, "wb") as file:
        file.write(packed.getvalue())
    if local:
        os.replace(f"{target}.new", target)
    if rank == 0:
        for number in set(_list(files, path)) - {size}:
            for other in range(number):
                if files.exists(old := f"{path}/{_name(other, number)}"):
                    files.rm_file(old)


def load(state: Compressor, folder: str, *, strict: bool = True) -> bool:
    """Load what `save` wrote; all ranks must call it. If it is not complete, rank 0 warns and nothing is loaded.

    With another number of ranks than saved, every rank reads all files, and the sum of the residuals is kept.

    Args:
        state: The compressor.
        folder: The folder of the files.
        strict: Refuse a state that was saved with other options.

    Returns:
        Whether the state was loaded.

    Raises:
        ValueError: The state was saved with other options, or for another model.
    """
    rank, size = rank_and_size()
    files, path = fsspec.core.url_to_fs(folder)
    saved_sizes = _list(files, path)
    saved_size = size if size in saved_sizes or len(saved_sizes) != 1 else saved_sizes[0]
    wanted = [rank] if saved_size == size else list(range(saved_size))
    states: list[Any] = []
    problem = ""
    for saved_rank in wanted:
        name = f"{path}/{_name(saved_rank, saved_size)}"
        try:
            with files.open(name, "rb") as file:
                states.append(torch.load(io.BytesIO(file.read()), weights_only=True))
        except FileNotFoundError:
            problem = f"{name} is missing"
        except Exception as error:  # torch.load has no error of its own for a damaged file
            problem = f"{name} cannot be read: {type(error).__name__}: {error}"
    counts = {saved.get("steps", saved.get("calls")) for saved in states}
    problems, counts_by_rank = _gather(problem), _gather(counts)
    if not any(problems) and len(set().union(*counts_by_rank)) > 1:
        problems = [f"the files in {path} are of different steps"]
    if any(problems):
        if rank == 0:
            _log.warning(
                "dtcomm: training continues without the state of compression: %s", _describe(problems)
            )
        return False
    saved = states[0] if saved_size == size else states
    options = {} if strict else {"strict": False}  # not every compressor has options that could differ
    try:
        state.load_state_dict(saved, **options)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return True


def has_files(folder: str) -> bool:
    """Return whether a folder has the state of any rank."""
    return bool(_list(*fsspec.core.url_to_fs(folder)))


def remove(folder: str) -> None:
    """Remove the folder, if it exists."""
    files, path = fsspec.core.url_to_fs(folder)
    if files.exists(path):
        files.rm(path, recursive=True)


def _name(rank: int, size: int) -> str:
    return f"rank{rank}-of-{size}.pt"


def _list(files: Any, path: str) -> list[int]:
    """Return the numbers of ranks of which a folder has files."""
    if not files.isdir(path):
        return []
    names = [str(name).rpartition("/")[2] for name in files.ls(path, detail=False)]
    return sorted({int(match[2]) for name in names if (match := _FILE.fullmatch(name))})


def _describe(problems: list[str]) -> str:
    found = [problem for problem in problems if problem]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"{found[0]}{more}. What error feedback still had to send is lost, once; PowerSGD's factors, DGC's momentum, "
        "references, the choice of 'auto', the guard's statistics and the warm-up start anew; and the run does not "
        "repeat an uninterrupted one bit for bit"
    )


def _gather(value: Any) -> list[Any]:
    """Return every rank's value."""
    values = [value] * rank_and_size()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
