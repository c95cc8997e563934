"""Count the machine instructions an element of codec kernels: python -m bench.sass.

It compiles the kernels of a few codec families for sm_90 with nvcc and disassembles them; no device is needed. A count
is that of the shortest path from a kernel's first instruction to its end that passes the loads and stores of a
warp's whole granule, which is a lower bound: slow paths and the branches of cut granules are not on it. Of a sum it is
the loop over the payloads alone.
"""

from __future__ import annotations

import heapq
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench import ptxas
from bench.common.report import ROOT

ARCHITECTURE = 90


class Kernel(NamedTuple):
    """A kernel and what a lane accesses on its hot path."""

    family: str  # the file of instantiations
    name: str  # as bench.ptxas prints it, or its end
    elements: int  # of a lane
    loads: tuple[str, int]  # the suffix of the loads and how many there are
    stores: tuple[str, int]
    terms: int = 0  # of a sum: its loop over the terms is counted alone, whose loads and stores are these


class Instruction(NamedTuple):
    address: int
    conditional: bool
    operation: str
    target: int | None


KERNELS = {
    "int8 encode": Kernel("int8_32", "encode 0", 32, (".128", 8), (".64", 4)),
    "int8 decode": Kernel("int8_32", "decode 1", 32, ("", 8), (".128", 8)),
    "int8 sum of 8": Kernel("int8_32", "reduce n", 32, (".64", 4), (".128", 0), 8),
    "int4 encode": Kernel("int4_32", "encode 0", 32, (".128", 8), ("", 4)),
    "int4 decode": Kernel("int4_32", "decode 1", 32, (".U16", 16), (".128", 8)),
    "int4 sum of 8": Kernel("int4_32", "reduce n", 32, ("", 4), (".128", 0), 8),
    "e4m3 encode": Kernel("e4m3_32", "encode 0", 8, (".128", 2), (".64", 1)),
    "e4m3 decode": Kernel("e4m3_32", "decode 1", 8, (".64", 1), (".128", 2)),
}


def disassembler() -> str:
    """Return the path of cuobjdump, of the toolkit or of Triton.

    Raises:
        SystemExit: It is not installed.
    """
    found = shutil.which("cuobjdump")
    triton = find_spec("triton")
    if found is None and triton is not None and triton.origin:
        found = str(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    if found is None or not Path(found).exists():
        raise SystemExit(
            "bench.sass: cuobjdump was not found; it comes with the CUDA toolkit and with Triton"
        )
    return found


def instructions(listing: str) -> list[Instruction]:
    """Return the instructions of one function of ``cuobjdump -sass``."""
    found = []
    for address, condition, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z][^;]*);", listing):
        operation = text.split()[0]
        target = re.search(r"0x([0-9a-f]+)$", text.strip()) if operation.startswith("BRA") else None
        conditional = bool(condition) or re.match(r"BRA\S* !?U?P\d|BRA\.DIV", text) is not None
        found.append(
            Instruction(int(address, 16), conditional, operation, int(target[1], 16) if target else None)
        )
    return found


def accesses(instruction: Instruction, kind: str, suffix: str) -> bool:
    """Whether it is a load (kind "LD") or a store ("ST") of global memory of that width."""
    parts = instruction.operation.split(".")
    if parts[0] not in (kind, kind + "G"):
        return False
    return suffix[1:] in parts if suffix else not {"64", "128", "U8", "U16", "S8", "S16"} & set(parts)


def shortest_path(code: list[Instruction], kernel: Kernel) -> int:
    """Return the fewest instructions from the first to an EXIT that include the kernel's loads and stores.

    Raises:
        ValueError: No path has them.
    """
    at = {instruction.address: index for index, instruction in enumerate(code)}
    (load, loads), (store, stores) = kernel.loads, kernel.stores
    queue, seen = [(0, 0, 0, 0)], set()
    while queue:
        count, index, loaded, stored = heapq.heappop(queue)
        if (index, loaded, stored) in seen or index >= len(code):
            continue
        seen.add((index, loaded, stored))
        one = code[index]
        loaded = min(loads, loaded + accesses(one, "LD", load))
        stored = min(stores, stored + accesses(one, "ST", store))
        if one.operation == "EXIT" and (loaded, stored) == (loads, stores):
            return count + 1
        if one.target is not None:
            heapq.heappush(queue, (count + 1, at[one.target], loaded, stored))
        if one.conditional or one.operation.split(".")[0] not in ("BRA", "EXIT", "RET"):
            heapq.heappush(queue, (count + 1, index + 1, loaded, stored))
    raise ValueError(f"{kernel.name}: no path has {loads} loads and {stores} stores of its widths")


def shortest_loop(code: list[Instruction], kernel: Kernel) -> int:
    """Return the instructions of the shortest loop with exactly the kernel's loads of its width.

    Raises:
        ValueError: There is none.
    """
    at = {instruction.address: index for index, instruction in enumerate(code)}
    load, loads = kernel.loads
    found = []
    for end, instruction in enumerate(code):
        begin = end + 1 if instruction.target is None else at[instruction.target]
        body = code[begin : end + 1]
        if body and sum(accesses(one, "LD", load) for one in body) == loads:
            found.append(len(body))
    if not found:
        raise ValueError(f"{kernel.name}: no loop has {loads} loads of its width")
    return min(found)


def count(names: list[str]) -> dict[str, float]:
    """Return the instructions an element of kernels, by their names in ``KERNELS``."""
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        sources = {path.stem: path for path in ptxas.instantiations(Path(folder))}
        for family in sorted({KERNELS[name].family for name in names}):
            cubin = Path(folder) / f"{family}.cubin"
            flags = ["-std=c++17", "-O3", "--fmad=false", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}"]
            command = [ptxas.tool("nvcc"), *flags, f"-arch=sm_{ARCHITECTURE}", "-cubin", "-o", str(cubin)]
            subprocess.run([*command, str(sources[f"codec_{family}"])], check=True, capture_output=True)
            dump = subprocess.run(
                [disassembler(), "-sass", str(cubin)], check=True, capture_output=True
            ).stdout
            listing = subprocess.run(["c++filt"], input=dump, check=True, capture_output=True).stdout.decode()
            functions = {}
            for part in re.split(r"Function : ", listing)[1:]:
                functions[ptxas.readable(part.split("\n", 1)[0])] = instructions(part)
            for name in names:
                kernel = KERNELS[name]
                if kernel.family == family:
                    code = next(code for title, code in functions.items() if title.endswith(kernel.name))
                    if kernel.terms:
                        counts[name] = shortest_loop(code, kernel) * kernel.terms / kernel.elements
                    else:
                        counts[name] = shortest_path(code, kernel) / kernel.elements
    return {name: counts[name] for name in names}


def main() -> int:
    for name, instructions_an_element in count(list(KERNELS)).items():
        print(f"{name:<24} {instructions_an_element:6.1f} instructions an element")
    return 0


if __name__ == "__main__":
    sys.exit(main())
