"""The DTCOMM_ environment variables: one table with their defaults, descriptions and valid values.

``get`` reads a variable and refuses an invalid value by name. The table is also the source of the reference page.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**31 - 1
TUNE_VERSION = 2  # of the tables that `dtcomm tune` writes

_log = logging.getLogger("dtcomm")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable.

    Attributes:
        default: The value if the variable is not set.
        meaning: What the variable does, for the reference page.
        choices: The valid values; empty: any.
        shared: Whether all ranks need the same value, which they compare when a communicator is made.
        most: The largest value of a variable that is a whole number; None: it is something else.
        build: Whether the variable is read when dtcomm is built, by setup.py or CMake.
        user: Whether users set it in ordinary runs; the others are for bug reports.
        check: Called with a value that is not empty; raises ValueError, with the reason, if it is not valid.
    """

    default: str = ""
    meaning: str
    choices: tuple[str, ...] = ()
    shared: bool = False
    most: int | None = None
    build: bool = False
    user: bool = False
    check: Callable[[str], object] | None = None


def _ports(text: str) -> range:
    """The ports of ``20000-20100`` or ``20000``."""
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ValueError("expected a port or a range of ports from 1 to 65535, such as 20000-20100")
    return range(first, last + 1)


def _new_folder(text: str) -> None:
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
        writable = os.access(text, os.W_OK)
    except OSError as error:
        raise ValueError(f"no folder that can be written: {error.strerror}") from None
    if not writable:
        raise ValueError("no folder that can be written")


VARIABLES: dict[str, Variable] = {
    "DTCOMM_KERNEL": Variable(
        meaning="Name of the kernels to use: reference, generic, avx2, avx512, avx512vbmi, neon or cuda. Empty: the"
        " fastest ones for the device",
    ),
    "DTCOMM_RUNTIME": Variable(
        default="auto",
        meaning="What executes operations. native: the native engine (CPU tensors). peer: fused kernels over peer"
        " memory (CUDA tensors; CPU tensors are then served as with auto). process_group: the group's own"
        " backend. auto: the engine where it works, else the group's backend; not the fused kernels, until they"
        " have run between several GPUs",
        choices=("auto", "native", "peer", "process_group"),
        shared=True,
    ),
    "DTCOMM_TRANSPORT": Variable(
        user=True,
        default="auto",
        meaning="How the native engine reaches other ranks: memory (shared memory), sockets (TCP) or ucx (UCX, for"
        " InfiniBand and RoCE). auto: memory inside a host; between hosts ucx if all ranks have UCX and an RDMA device,"
        " else sockets. A transport that is forced is an error where it is not possible",
        choices=("auto", "memory", "sockets", "ucx"),
        shared=True,
    ),
    "DTCOMM_HOST_ID": Variable(
        meaning="Name of the host that this rank counts as, for tests. Empty: the real host"
    ),
    "DTCOMM_PORTS": Variable(
        user=True,
        meaning="Ports on which ranks listen for the connections of the native engine, such as 20000-20100: one for"
        " each rank of a host while a communicator is made. Between sites it is needed as long as the communicator"
        " lives. Ranks that need connections then use them or raise."
        " Empty: ports that the kernel chooses",
        shared=True,
        check=_ports,
    ),
    "DTCOMM_CONNECTIONS": Variable(
        default="0",
        meaning="TCP connections that carry the payloads between two ranks that share no memory, 1 to 64; with more"
        " than one, a further connection carries what is short. 0: one, or several where a round trip takes 2 ms or"
        " more, by the round trip and the kernel's largest socket buffers",
        shared=True,
        most=64,
    ),
    "DTCOMM_TOPOLOGY": Variable(
        meaning="File with the rates of the links between all ranks of the job, the output of `dtcomm doctor --json`"
        " under torchrun or the matrix gbit of docs/guides/several-hosts.md, which rank 0 of a group reads."
        " algorithm=auto and hierarchical algorithms then group ranks by these links instead of by hosts. Empty: by"
        " hosts",
    ),
    "DTCOMM_SECRET": Variable(
        user=True,
        meaning="A secret that all ranks share, such as the output of `openssl rand -hex 32`. Connections of the native"
        " engine between hosts, and those to a `dtcomm coordinator`, are refused to callers that do not know"
        " it. It is never sent, printed or logged. Empty: no secret",
    ),
    "DTCOMM_CHECK": Variable(
        default="0",
        meaning="1: compare operation, size, dtype, codec before calls of the group's backend; the engine always does",
        choices=("0", "1"),
        shared=True,
    ),
    "DTCOMM_CHECKSUM": Variable(
        default="0",
        meaning="1: every payload is sent with its CRC32C, unless a call has checksum=False",
        choices=("0", "1"),
        shared=True,
    ),
    "DTCOMM_FLIGHT_DIR": Variable(
        user=True,
        meaning="Folder in which ranks write the last operations if one fails, for dtcomm doctor --flight. Empty: none",
        check=_new_folder,
    ),
    "DTCOMM_DISABLE": Variable(
        user=True,
        default="0",
        meaning="1: every integration leaves everything uncompressed, whatever codec it is given, and says so in one"
        " line of the log. Codecs of single collectives (dtcomm.all_reduce) stay, and the backend has none",
        choices=("0", "1"),
        shared=True,
    ),
    "DTCOMM_EMULATE_LINK": Variable(
        user=True,
        meaning="Link to emulate between ranks of the native engine: 10gbit,50us or "
        "inside=400gbit,2us;between=10gbit,50us. Empty: none",
        shared=True,
    ),
    "DTCOMM_STAGING": Variable(
        default="auto",
        meaning="Stores into shared memory: ordinary, or streaming past the cache. auto: chosen by trials",
        choices=("auto", "ordinary", "streaming"),
        shared=True,
    ),
    "DTCOMM_SINGLE_COPY": Variable(
        default="auto",
        meaning="Whether receivers copy out of the sender's own memory with process_vm_readv. auto: where trials"
        " show that it pays and the kernel permits it. on: wherever possible, and an error where the kernel does not"
        " permit it. off: never",
        choices=("auto", "on", "off"),
        shared=True,
    ),
    "DTCOMM_TRIALS": Variable(
        default="first",
        meaning="When the native engine tries other stores, sizes of pieces and ways of copying in the operations"
        " themselves, to use what takes the least time. first: in the first operations of each kind and size, which"
        " then stay as they are. always: again and again, for machines whose cores move. never: it uses what it begins"
        " with",
        choices=("first", "always", "never"),
        shared=True,
    ),
    "DTCOMM_PIECE_KIB": Variable(
        default="0",
        meaning="Size of a pipelined piece in KiB. 0: chosen by the size of the message and by trials",
        shared=True,
        most=_UNLIMITED,
    ),
    "DTCOMM_THREADS": Variable(
        user=True,
        default="0",
        meaning="Threads with which a rank of the native engine encodes, sums, decodes and copies tensors of 128 KiB"
        " and more, 1 to 256. 0: as many as the host has cores for each of its ranks, or one where trials show that"
        " it takes less time",
        shared=True,
        most=256,
    ),
    "DTCOMM_SPINS": Variable(
        default="0",
        meaning="Polls of a flag before a waiting rank yields. 0: 1000, 64 if ranks share cores, 32 with sockets, UCX",
        most=_UNLIMITED,
    ),
    "DTCOMM_YIELD_US": Variable(
        default="0",
        meaning="Microseconds that a waiting rank yields before it sleeps. 0: 50, or 1000 where ranks share cores",
        most=_UNLIMITED,
    ),
    "DTCOMM_TUNE": Variable(
        user=True,
        meaning="File with the table of dtcomm tune that algorithm=auto reads; rank 0's file serves all ranks. "
        "off: none. Empty: the file in the user's cache folder, if there is one",
    ),
    "DTCOMM_NATIVE_DIR": Variable(
        meaning="Folder to load the native modules from, for builds with sanitizers"
    ),
    "DTCOMM_CUDA": Variable(
        default="AUTO",
        meaning="1: build the CUDA kernels, for the architectures of release wheels. 0: do not. AUTO: build them for"
        " the GPU that is visible, if there is one",
        choices=("AUTO", "0", "1"),
        build=True,
    ),
    "DTCOMM_BUILD_TYPE": Variable(default="Release", meaning="CMake's build type", build=True),
    "DTCOMM_EMULATOR": Variable(
        default="0",
        meaning="1: also build the module that runs the CUDA kernels' source on the CPU, for tests and"
        " dtcomm perf --device emulator",
        choices=("0", "1"),
        build=True,
    ),
    "DTCOMM_SANITIZE": Variable(
        meaning="Sanitizers for the native code: address,undefined or thread", build=True
    ),
    "DTCOMM_TESTS": Variable(
        default="OFF", meaning="ON: also build the tests in csrc/tests", choices=("OFF", "ON"), build=True
    ),
    "DTCOMM_WERROR": Variable(
        default="0", meaning="1: treat compiler warnings as errors", choices=("0", "1"), build=True
    ),
}

# Variables of other programs that dtcomm reads, with what it takes from them; for the reference page.
EXTERNAL: dict[str, str] = {
    "GLOO_SOCKET_IFNAME": "The network interface by which other hosts reach this rank, as for Gloo; of several,"
    " separated by commas, the first with an address. Unset: that of the route to the store, else of the host's"
    " name, else the first that is not the loopback",
    "RANK": "Set by torchrun: `dtcomm perf`, `tune` and `doctor` then measure the ranks of the job",
    "WORLD_SIZE": "Set by torchrun: the number of ranks",
    "LOCAL_RANK": "Set by torchrun: the number of this rank among those of its host, which chooses its GPU and cores",
    "LOCAL_WORLD_SIZE": "Set by torchrun: the number of ranks of this host, which share its cores (`DTCOMM_THREADS`)",
    "XDG_CACHE_HOME": "The user's cache folder, in which the table of `dtcomm tune` lies. Unset: `~/.cache`",
    "TORCH_DIST_NAN_CHECK": "torch's, 1: the backend dtcomm warns that it does not look for NaN",
    "CUDAARCHS": "CMake's, at build time: the architectures of the CUDA kernels, such as `90-real`",
}


def get(name: str) -> str:
    """The value of a variable, or its default; ValueError names the variable and the valid values."""
    variable = VARIABLES[name]
    value = os.environ.get(name, variable.default)
    if variable.choices and value not in variable.choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(variable.choices)}")
    if variable.most is not None and not (value.isdecimal() and int(value) <= variable.most):
        raise ValueError(f"{name}={value!r}: expected a whole number from 0 to {variable.most}")
    if variable.check is not None and value:
        try:
            variable.check(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from None
    return value


def printable(name: str, value: str) -> str:
    """Return the value of a variable as it may be printed and sent: that of DTCOMM_SECRET is left out."""
    return "(set)" if name == "DTCOMM_SECRET" and value else value


def shared() -> dict[str, str]:
    """The values of the variables that must be equal on all ranks.

    All variables are checked on the way; those that dtcomm does not know are logged once.
    """
    _warn_of_unknown()
    values = {name: get(name) for name, variable in VARIABLES.items() if not variable.build}
    return {name: value for name, value in values.items() if VARIABLES[name].shared}


def unknown() -> list[str]:
    """The variables that are set and begin with DTCOMM_, but which dtcomm does not know."""
    return sorted(name for name in os.environ if name.startswith("DTCOMM_") and name not in VARIABLES)


@functools.cache
def _warn_of_unknown() -> None:
    for name in unknown():
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        _log.warning("dtcomm: the variable %s is not known%s", name, hint)


DISABLED = "nothing is compressed: DTCOMM_DISABLE=1"


def disabled() -> bool:
    """Whether DTCOMM_DISABLE turns all compression off; the first call in a process that finds it so logs it."""
    if get("DTCOMM_DISABLE") == "0":
        return False
    _log_disabled()
    return True


@functools.cache
def _log_disabled() -> None:
    _log.warning("dtcomm: %s", DISABLED)


def ports() -> range:
    """The ports that DTCOMM_PORTS allows to listen on; port 0, of which the kernel makes one, if it is not set."""
    text = get("DTCOMM_PORTS")
    return _ports(text) if text else range(1)


def tune_file() -> Path:
    """The file in the user's cache folder that `dtcomm tune` writes and ``tune_text`` reads."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "dtcomm" / f"tune-{platform.node() or 'host'}.json"


def tune_text() -> str:
    """The contents of the table that DTCOMM_TUNE names, or of the user's own; empty if there is none.

    ValueError if the file that DTCOMM_TUNE names cannot be read. The user's own table is ignored with a warning if it
    cannot be read.
    """
    chosen = get("DTCOMM_TUNE")
    if chosen == "off":
        return ""
    if chosen:
        try:
            return Path(chosen).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"DTCOMM_TUNE={chosen}: {error.strerror}") from None
    path = tune_file()
    try:
        text = path.read_text(encoding="utf-8")
        version = json.loads(text)["version"]
        if version == TUNE_VERSION:
            return text
        reason = f"version {version}, expected {TUNE_VERSION}"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error)
    _log.warning("dtcomm: %s is not used (%s); run `dtcomm tune` again", path, reason)
    return ""


def links_text() -> str:
    """The contents of the file that DTCOMM_TOPOLOGY names; empty if there is none. ValueError if it cannot be read."""
    chosen = get("DTCOMM_TOPOLOGY")
    if not chosen:
        return ""
    try:
        return Path(chosen).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"DTCOMM_TOPOLOGY={chosen}: {error.strerror}") from None
