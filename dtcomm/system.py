"""What the operating system is asked for: whole files, text that a terminal may show, the cores of this process."""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from typing import Any


def write_file(path: str | os.PathLike[str], content: str | bytes, mode: int = 0o666) -> None:
    """Replace a file at once: readers see the old content or the new one.

    The folder may be shared with other users. The content goes to a new file, whose name they cannot guess; a link at
    ``path`` is replaced, not followed. What is no file, such as ``/dev/stdout``, is written to.

    Args:
        path: The file; its folder exists.
        content: Bytes, or text in UTF-8.
        mode: The permissions of the file, less the umask.
    """
    target, data = Path(path), content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    draft = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        draft.replace(target)
    except BaseException:
        draft.unlink()
        raise


def save_figure(figure: Any, path: str | os.PathLike[str], dpi: int = 150) -> None:
    """Write a matplotlib figure to a file, whose suffix says the format; ValueError if there is no such format."""
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:] or "png", dpi=dpi)
    write_file(path, picture.getvalue())


def printable(text: str) -> str:
    """Return text of a file or a stranger without what would act on a terminal: such characters become ``?``."""
    return "".join(character if character.isprintable() else "?" for character in text)


def allowed_cores() -> list[int]:
    """Return the cores that this process may run on; all cores where the system does not say (gVisor, macOS)."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (OSError, AttributeError):
        return list(range(os.cpu_count() or 1))
