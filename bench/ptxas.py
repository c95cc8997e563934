"""Report registers, spills and shared memory of every CUDA kernel: python -m bench.ptxas [--json PATH].

It compiles csrc/cuda with nvcc's report; no device is needed. Occupancy is computed from registers and shared memory
and the limits of a multiprocessor (CUDA's programming guide, table of compute capabilities). The JSON holds the
maxima of each kernel family and the kernels that spill or have a stack. A stack is local memory, too: stores to it for
every element took a sixth of a fused kernel's time, without a spill. The exit status is 1 if a kernel of the first tier
spills more than fused kernels do outside the loops over elements.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from bench.common.report import ROOT, write

# compute capability → (registers, bytes of shared memory, threads) of a multiprocessor
LIMITS = {80: (65536, 163840, 2048), 90: (65536, 232448, 2048), 100: (65536, 232448, 2048)}
# csrc/cuda/kernel_variants.h, warp.cuh, fused/peer_memory.cuh
WARP_THREADS, BLOCK_THREADS, FUSED_THREADS = 256, 512, 384
RESERVED_SHARED = 1024  # bytes that the system takes of each thread block's
# Bytes of stores and loads of a fused kernel, none of them in loops over elements, but for two loads with an epilogue.
SPILLED_OUTSIDE_LOOPS = 256
COUNTS = {"-1": "n", **{str(count): str(count) for count in (0, 1, 8)}}


class Resources(TypedDict):
    kernel: str
    architecture: int
    registers: int
    stack: int
    spills: int
    shared: int
    occupancy: float
    first_tier: bool


def tool(name: str) -> str:
    """Return the path of a program of the CUDA toolkit.

    Raises:
        SystemExit: It is not installed.
    """
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *(f"{home}/bin" for home in homes)]))
    if path is None:
        raise SystemExit(f"bench.ptxas: {name} was not found; it comes with the CUDA toolkit")
    return path


def readable(name: str) -> str:
    """Return a kernel's demangled name, ``combine_warp_kernel<Integer<8, 4u, true>, 1, true, false>(…)``, in words."""
    name = name.replace("dtcomm::cuda::", "").replace("dtcomm::", "").replace("(anonymous namespace)::", "")
    name = re.sub(r"\(\w+\)(?=\d)", "", name)  # enumerators are numbers with their type before them
    name = re.sub(r"\(.*", "", name).removeprefix("void ")
    match = re.fullmatch(r"fused_kernel<(.*)>", name)
    if match is not None:
        return f"{match[1].strip()} fused"
    match = re.fullmatch(r"combine_(warp|block)_kernel<(.*), (-?\d+), (true|false), (true|false)>", name)
    if match is None:
        return name
    _, family, count, encodes, feedback = match.groups()
    verb = "reduce" if encodes == "false" else "encode" if count == "0" else "reduce_encode"
    if verb == "reduce" and count == "1":
        verb = "decode"
    return f"{family} {verb} {COUNTS[count]}{' with feedback' if feedback == 'true' else ''}"


def occupancy(architecture: int, registers: int, shared: int, threads: int) -> float:
    """Return the share of a multiprocessor's threads that can be resident."""
    register_file, shared_memory, most = LIMITS[architecture]
    of_warp = -(-registers * 32 // 256) * 256  # registers are given to warps by 256
    blocks = min(register_file // (of_warp * threads // 32), most // threads)
    if shared:
        blocks = min(blocks, shared_memory // (shared + RESERVED_SHARED))
    return blocks * threads / most


def compile_one(source: Path, architecture: int) -> list[Resources]:
    """Return the kernels of one file, as ptxas reports them."""
    command = [
        tool("nvcc"),
        "-std=c++17",
        "-O3",
        "--fmad=false",
        "--expt-relaxed-constexpr",
        f"-I{ROOT / 'csrc'}",
    ]
    command += ["-cubin", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-o", os.devnull, str(source)]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    report = subprocess.run(["c++filt"], input=report, check=True, capture_output=True, text=True).stdout
    kernels = []
    for entry in report.split("Compiling entry function ")[1:]:
        name = entry[1 : entry.index("' for")]
        # The kernel's own figures come first, then those of functions that it calls.
        found = re.findall(r"(\d+) (registers|bytes \w+ \w+|bytes smem)", entry)
        used = {resource: int(count) for count, resource in reversed(found)}
        first_tier = any(
            kernel in name for kernel in ("combine_warp_kernel", "fused_kernel", "expand_kernel")
        )
        threads = WARP_THREADS if first_tier else BLOCK_THREADS
        if name.split("<")[0].endswith("fused_kernel"):
            threads = FUSED_THREADS
        shared = used.get("bytes smem", 0)
        kernel: Resources = {
            "kernel": readable(name),
            "architecture": architecture,
            "registers": used["registers"],
            "stack": used.get("bytes stack frame", 0),
            "spills": used.get("bytes spill stores", 0) + used.get("bytes spill loads", 0),
            "shared": shared,
            "occupancy": occupancy(architecture, used["registers"], shared, threads),
            "first_tier": first_tier,
        }
        kernels.append(kernel)
    return kernels


def instantiations(folder: Path) -> list[Path]:
    """Write source files with the kernels of each codec family, as cmake/cuda.cmake does; return their paths."""
    cuda = ROOT / "csrc" / "cuda"
    families: dict[tuple[str, str], str] = {}
    for line in (cuda / "instantiations.txt").read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, kind, family = line.split(maxsplit=2)
        families[kind, name] = families.get((kind, name), "") + f"INSTANTIATE({family});\n"
    for (kind, name), lines in families.items():
        text = (cuda / f"instantiate_{kind}.cu.in").read_text()
        (folder / f"{kind}_{name}.cu").write_text(text.replace("@INSTANTIATIONS@", lines))
    return [folder / f"{kind}_{name}.cu" for kind, name in families]


def read() -> list[Resources]:
    """Return every kernel for each architecture."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = sorted((ROOT / "csrc" / "cuda").rglob("*.cu")) + instantiations(Path(folder))
        reports = pool.map(
            lambda job: compile_one(*job), [(source, arch) for arch in LIMITS for source in sources]
        )
        kernels = [kernel for report in reports for kernel in report]
    return sorted(kernels, key=lambda kernel: (kernel["architecture"], kernel["kernel"]))


def summary(kernels: list[Resources]) -> dict[str, Any]:
    """Return the largest use of resources of each family and architecture, and the kernels that spill."""
    groups: dict[tuple[str, int, bool], list[Resources]] = {}
    for kernel in kernels:
        family = re.split(r"\W", kernel["kernel"], maxsplit=1)[0]
        groups.setdefault((family, kernel["architecture"], kernel["first_tier"]), []).append(kernel)
    families = [
        {
            "family": family,
            "architecture": architecture,
            "first_tier": first_tier,
            "kernels": len(group),
            **{
                name: max(kernel[name] for kernel in group)
                for name in ("registers", "stack", "spills", "shared")
            },
            "lowest_occupancy": min(kernel["occupancy"] for kernel in group),
        }
        for (family, architecture, first_tier), group in sorted(groups.items())
    ]
    return {
        "families": families,
        "spilling": [kernel for kernel in kernels if kernel["spills"] or kernel["stack"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    kernels = read()
    for kernel in kernels:
        if kernel["architecture"] == 90 or kernel["spills"]:
            stack = f"  {kernel['stack']} bytes of stack" if kernel["stack"] else ""
            spills = f"  {kernel['spills']} bytes spilled" if kernel["spills"] else ""
            print(
                f"sm_{kernel['architecture']:<4} {kernel['kernel']:<60} {kernel['registers']:>4} registers "
                f"{kernel['shared']:>6} B shared  {kernel['occupancy']:>5.0%}{stack}{spills}"
            )
    if options.json:
        write(options.json, summary(kernels))
    spilled = [k for k in kernels if k["first_tier"] and k["spills"] > SPILLED_OUTSIDE_LOOPS]
    for kernel in spilled:
        print(f"spills: {kernel['kernel']} on sm_{kernel['architecture']}", file=sys.stderr)
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
