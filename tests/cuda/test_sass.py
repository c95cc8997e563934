"""The machine code that ptxas makes of the kernels is free of an instruction that it uses wrongly; no device is needed.

ptxas 13.0 turns `n < 0 ? 0 : n < 8 ? n : 8` into VIMNMX.RELU, and a later `== 8` into that instruction's predicate,
which an H100 sets for smaller numbers, too. Kernels then loaded elements past the end of a tensor.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import ptxas, sass

# Instructions have two words of 64 bits. The low nine bits of the first are the operation; in the second stands
# the number of the predicate that VIMNMX writes, from bit 17 on. 7 is PT, which discards it and is harmless.
VIMNMX, OPERATION, PREDICATE, DISCARDED = 0x48, 0x1FF, 17, 7
# Instructions an element of the shortest hot path, as recorded with nvcc 13.0.
LIMITS = {"int8 encode": 13, "int8 decode": 8, "int8 sum of 8": 36}
CLAMP = """
extern "C" __global__ void clamp(const int* in, int* out, int* all) {
  const int present = in[threadIdx.x] < 0 ? 0 : in[threadIdx.x] < 8 ? in[threadIdx.x] : 8;
  out[threadIdx.x] = present;
  all[threadIdx.x] = present == 8;
}
"""


def disassembler() -> str:
    try:
        return sass.disassembler()
    except SystemExit as missing:
        pytest.skip(str(missing))


def require_compiler() -> None:
    if shutil.which("c++filt") is None:
        pytest.skip("c++filt was not found; it comes with binutils")
    try:
        ptxas.tool("nvcc")
    except SystemExit as missing:
        pytest.skip(str(missing))


def machine_code(cubin: Path) -> Iterator[np.ndarray]:
    """The instructions of each kernel of an ELF file, [instructions, 2] words of 64 bits."""
    data = cubin.read_bytes()
    at, size, count = (
        struct.unpack_from(kind, data, place)[0] for kind, place in (("<Q", 40), ("<H", 58), ("<H", 60))
    )
    for header in range(at, at + size * count, size):
        flags, _, start, length = struct.unpack_from("<4Q", data, header + 8)
        if flags & 4:  # executable
            yield np.frombuffer(data, "<u8", length // 8, start).reshape(-1, 2)


def wrong_instructions(cubin: Path) -> int:
    """How many minimums and maximums of integers write a predicate."""
    wrong = 0
    for words in machine_code(cubin):
        predicate = words[:, 1] >> np.uint64(PREDICATE) & np.uint64(DISCARDED)
        wrong += int(((words[:, 0] & np.uint64(OPERATION) == VIMNMX) & (predicate != DISCARDED)).sum())
    return wrong


def test_no_kernel_uses_predicate_of_relu_minimum(tmp_path: Path) -> None:
    module = pytest.importorskip("dtcomm._cuda", reason="_cuda was not built: no nvcc, or DTCOMM_CUDA=0")
    extract = [disassembler(), "-xelf", "sm_90", str(Path(module.__file__).resolve())]
    subprocess.run(extract, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    cubins = list(tmp_path.glob("*.cubin"))
    assert cubins, "there is machine code"
    assert {cubin.name: wrong for cubin in cubins if (wrong := wrong_instructions(cubin))} == {}


@pytest.mark.slow
def test_kernels_of_int8_stay_in_registers_and_leave_room_for_blocks(tmp_path: Path) -> None:
    """They stored each position in local memory when its address was passed to a function for cut granules.

    Of 65,536 registers, 64 leave room for four blocks of 256 threads and 72 for three.
    """
    require_compiler()
    source = next(path for path in ptxas.instantiations(tmp_path) if path.name == "codec_int8_32.cu")
    kernels = ptxas.compile_one(source, 90)
    registers = {kernel["kernel"]: kernel["registers"] for kernel in kernels}
    sums = {name for name in registers if " n" in name}
    assert len(sums) == 2 and len(registers) == 5
    assert {kernel["kernel"]: kernel["stack"] for kernel in kernels if kernel["stack"]} == {}
    assert {name: used for name, used in registers.items() if used > (72 if name in sums else 64)} == {}


def test_kernels_of_int8_execute_few_instructions_an_element() -> None:
    disassembler()
    require_compiler()
    counts = sass.count(list(LIMITS))
    assert {name: count for name, count in counts.items() if count > LIMITS[name]} == {}


def test_search_finds_what_ptxas_makes_of_a_clamp(tmp_path: Path) -> None:
    """With a compiler in which this fails, the search above is no longer needed."""
    try:
        nvcc = ptxas.tool("nvcc")
    except SystemExit as missing:
        pytest.skip(str(missing))
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13.0" not in version:
        pytest.skip("what other versions of nvcc make of it is not known")
    source, cubin = tmp_path / "clamp.cu", tmp_path / "clamp.cubin"
    source.write_text(CLAMP)
    subprocess.run([nvcc, "-arch=sm_90", "-cubin", "-o", str(cubin), str(source)], check=True, timeout=100)
    assert wrong_instructions(cubin) == 1
