"""Training text of the demo: the source of Python's standard library, which is present on every machine."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

#: Printable ASCII and the newline; all other characters become the last symbol.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(ALPHABET) + 1

_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "ensurepip",
}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and held-out symbols, uint8 [characters], from disjoint sets of files."""

    training: torch.Tensor
    held_out: torch.Tensor
    files: int


def load(root: Path | None = None, limit: int = 8_000_000) -> Corpus:
    """Read up to ``limit`` characters of the library's modules, in the order of their names.

    A tenth of the files, chosen by a checksum of their names, is held out. Order and split depend only on the names, so
    every rank and every run reads the same text.

    Raises:
        ValueError: ``root`` has too little text.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts: dict[bool, list[str]] = {False: [], True: []}
    total = files = 0
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED.intersection(parts[:-1]):
            continue
        text = path.read_text(encoding="utf-8", errors="replace").expandtabs(4)
        texts[zlib.crc32("/".join(parts).encode()) % 10 == 0].append(text)
        files += 1
        total += len(text)
        if total >= limit:
            break
    training, held_out = ("".join(texts[held_out]) for held_out in (False, True))
    if min(len(training), len(held_out)) < 10_000:
        raise ValueError(f"{root}: {files} Python files with {total} characters are too little to train on")
    return Corpus(training=_symbols(training), held_out=_symbols(held_out), files=files)


def batch(
    corpus: Corpus, *, seed: int, step: int, rank: int, size: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, int64 [size, length], which depend only on seed, step and rank."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4099 + rank)
    starts = torch.randint(corpus.training.numel() - length - 1, (size,), generator=generator)
    return _windows(corpus.training, starts, length)


def held_out_batches(
    corpus: Corpus, *, windows: int, size: int, length: int, rank: int, ranks: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's share of ``windows`` evenly spaced held-out windows, in batches of ``size``."""
    starts = torch.linspace(0, corpus.held_out.numel() - length - 1, windows).long()[rank::ranks]
    return [_windows(corpus.held_out, part, length) for part in torch.split(starts, size)]


def _symbols(text: str) -> torch.Tensor:
    table = torch.full((256,), VOCABULARY - 1, dtype=torch.uint8)
    for symbol, character in enumerate(ALPHABET):
        table[ord(character)] = symbol
    # One byte per character: characters outside latin-1 become "?", others outside ASCII the last symbol.
    data = torch.frombuffer(bytearray(text.encode("latin-1", errors="replace")), dtype=torch.uint8)
    return table[data.long()]


def _windows(symbols: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = symbols[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
