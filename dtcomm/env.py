"""The one list of DTCOMM_ variables. Read through ``get``, so that a wrong value is refused by name."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable: its default, what it does, and its valid values (empty: any).

    Ranks compare the ``shared`` ones when a communicator is made: they change what is sent.
    """

    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    shared: bool = False
    number: bool = False


VARIABLES: dict[str, Variable] = {
    "DTCOMM_KERNEL": Variable(
        default="",
        meaning="the kernels to use (reference, generic, avx2, avx512, cuda, triton); empty: the best for the device",
    ),
    "DTCOMM_RUNTIME": Variable(
        default="auto",
        meaning="what moves the bytes: the native engine (CPU tensors), fused kernels over peer memory (CUDA tensors; "
        "CPU tensors then go as with auto), or the group's own backend; auto: the first two where they can",
        choices=("auto", "native", "peer", "process_group"),
        shared=True,
    ),
    "DTCOMM_TRANSPORT": Variable(
        default="auto",
        meaning="how the native engine reaches peers: shared memory, sockets; auto: memory in a host, sockets between",
        choices=("auto", "memory", "sockets"),
        shared=True,
    ),
    "DTCOMM_HOST_ID": Variable(default="", meaning="which host this rank counts as (for tests)"),
    "DTCOMM_CHECK": Variable(
        default="0",
        meaning="1: compare operation, size, dtype and codec among ranks before each process-group operation",
        choices=("0", "1"),
        shared=True,
    ),
    "DTCOMM_CHECKSUM": Variable(
        default="0",
        meaning="1: every payload travels with its CRC32C, unless a call says checksum=False",
        choices=("0", "1"),
        shared=True,
    ),
    "DTCOMM_FLIGHT_DIR": Variable(
        default="",
        meaning="where ranks write their last operations when one fails, for dtcomm doctor --flight",
    ),
    "DTCOMM_LINK": Variable(
        default="",
        meaning="emulate a link: '10gbit,50us', or 'inside=400gbit,2us;between=10gbit,50us'; empty: none",
        shared=True,
    ),
    "DTCOMM_STAGING": Variable(
        default="auto",
        meaning="stores into shared memory: ordinary, or streaming past the cache; auto: by the round trip",
        choices=("auto", "ordinary", "streaming"),
        shared=True,
    ),
    "DTCOMM_SINGLE_COPY": Variable(
        default="auto",
        meaning="receivers copy out of the sender's own memory (process_vm_readv): auto, where it pays and the kernel "
        "permits it; on: wherever it can be, an error where it is not permitted; off: never",
        choices=("auto", "on", "off"),
        shared=True,
    ),
    "DTCOMM_PIECE_KIB": Variable(
        default="0", meaning="size of a pipelined piece in KiB; 0: chosen by size", shared=True, number=True
    ),
    "DTCOMM_SPINS": Variable(
        default="0",
        meaning="looks at a flag before the first yield; 0: 1000, or 64 where ranks share cores",
        number=True,
    ),
    "DTCOMM_YIELD_US": Variable(
        default="0",
        meaning="microseconds of yielding before sleeping; 0: 50, or 1000 where ranks share cores",
        number=True,
    ),
    "DTCOMM_TUNE": Variable(
        default="",
        meaning="the table of `dtcomm tune` that algorithm=auto reads, rank 0's for all: a file; off; empty: the one "
        "in the user's cache folder, where there is one",
    ),
    "DTCOMM_NATIVE_DIR": Variable(
        default="", meaning="folder to load the native modules from (sanitizer builds)"
    ),
    "DTCOMM_CUDA": Variable(
        default="AUTO", meaning="at build time: 1 builds _cuda, 0 does not, AUTO where nvcc is found"
    ),
    "DTCOMM_BUILD_TYPE": Variable(default="Release", meaning="at build time: CMake's build type"),
    "DTCOMM_SANITIZE": Variable(default="", meaning="at build time: sanitizers for the native core"),
    "DTCOMM_TESTS": Variable(default="OFF", meaning="at build time: ON also builds csrc/tests"),
    "DTCOMM_WERROR": Variable(default="0", meaning="at build time: 1 makes warnings errors"),
}


def get(name: str) -> str:
    """The variable's value or default; ValueError names the variable and what is valid."""
    variable = VARIABLES[name]
    value = os.environ.get(name, variable.default)
    if variable.choices and value not in variable.choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(variable.choices)}")
    if variable.number and not value.isdecimal():
        raise ValueError(f"{name}={value!r} is not a whole number")
    return value


def shared() -> dict[str, str]:
    """The variables that ranks must agree on, with their values here."""
    return {name: get(name) for name, variable in VARIABLES.items() if variable.shared}


def tune_file() -> Path:
    """Where `dtcomm tune` keeps what it measured on this host, and where it is looked for."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "dtcomm" / f"tune-{platform.node() or 'host'}.json"


def tune_text() -> str:
    """The table that DTCOMM_TUNE names, or the user's own; empty where there is none. ValueError names a file that
    cannot be read.
    """
    chosen = get("DTCOMM_TUNE")
    if chosen == "off":
        return ""
    path = Path(chosen) if chosen else tune_file()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        if not chosen and isinstance(error, FileNotFoundError):
            return ""
        raise ValueError(f"DTCOMM_TUNE={chosen}: {path}: {error.strerror}") from None
