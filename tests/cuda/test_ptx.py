"""The PTX accesses that nvcc emits for memory that peers write while a kernel runs; no device is needed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bench import ptxas

SOURCE = """
#include "cuda/fused/launch.cuh"
namespace dtcomm::cuda {
using Family = Integer<8, 0, IntegerOptions::plain>;
template __global__ void fused_kernel<Family>(const __grid_constant__ FusedParams, const __grid_constant__ Family);
}
"""
ACCESS = re.compile(
    r"^\s*(?:@!?%p\d+ )?((?:ld|ldu|st|tex|tld4|suld|cp|atom|red|fence|membar)\.[\w.:]+)", re.M
)
STRONG = re.compile(r"\.(release|acquire|relaxed|acq_rel|volatile|mmio)\b")
# Loads that may miss stores made since the launch began, and copies that plain fences do not order.
BLIND = re.compile(r"^(ldu\b|tex\b|tld4\b|suld\b|cp\b|ld\.(\w+\.)*nc\b|ld\.const\b)")


def accesses_by_kernel(ptx: str) -> dict[str, list[str]]:
    """The accesses of each kernel."""
    kernels = ptx.split(".entry ")[1:]
    return {kernel[: kernel.index("(")]: ACCESS.findall(kernel) for kernel in kernels}


def complaints(accesses: list[str]) -> list[str]:
    """The faults in the accesses of a kernel that waits for peers."""
    blind = [f"{access} may not see what a peer has stored" for access in accesses if BLIND.match(access)]
    narrow = [
        f"{access} is not of the system"
        for access in accesses
        if STRONG.search(access) and ".sys" not in access
    ]
    required = ("st.release.sys", "ld.acquire.sys")
    missing = [
        f"no {prefix}" for prefix in required if not any(access.startswith(prefix) for access in accesses)
    ]
    return blind + narrow + missing


@pytest.mark.parametrize(
    ("access", "complaint"),
    [
        ("ld.global.nc.v4.u32", "may not see"),
        ("@%p4 ld.global.nc.L1::no_allocate.u32", "may not see"),
        ("cp.async.cg.shared.global", "may not see"),
        ("ld.acquire.gpu.global.u32", "not of the system"),
        ("st.volatile.global.u32", "not of the system"),
        ("ld.global.cs.v4.u32", ""),
        ("st.relaxed.sys.u32", ""),
    ],
)
def test_complaints_name_wrong_accesses(access: str, complaint: str) -> None:
    """`complaints` of a kernel that has one access more than a correct one."""
    required = ["st.release.sys.global.u32", "ld.acquire.sys.global.u32"]
    assert complaints([]) == ["no st.release.sys", "no ld.acquire.sys"]
    text = ".entry kernel()\n" + "".join(f"\t{line} \t%r1, [%rd1];\n" for line in (*required, access))
    reported = complaints(accesses_by_kernel(text)["kernel"])
    assert [complaint in line for line in reported] == ([True] if complaint else [])


@pytest.mark.slow
def test_fused_kernels_access_peer_memory_at_system_scope(tmp_path: Path) -> None:
    try:
        nvcc = ptxas.tool("nvcc")
    except SystemExit as missing:
        pytest.skip(str(missing))
    source, ptx = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    source.write_text(SOURCE)
    flags = ["-std=c++17", "-O3", "--fmad=false", "--expt-relaxed-constexpr", f"-I{ptxas.ROOT / 'csrc'}"]
    command = [nvcc, *flags, "-ptx", "-arch=compute_90", "-o", str(ptx), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    kernels = accesses_by_kernel(ptx.read_text())
    assert len(kernels) == 1
    for name, accesses in kernels.items():
        assert complaints(accesses) == [], name
        assert any(access.startswith("ld.global.cs") for access in accesses), (
            "slots are read by sixteen bytes"
        )
