"""The CUDA kernels, as csrc/python/cuda*.cpp binds them; this module exists where nvcc was found."""

from collections.abc import Sequence
from typing import TypedDict

# csrc/python/cuda.cpp
class Device(TypedDict):
    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int

class Platform(TypedDict):
    driver: int
    runtime: int
    error: str
    devices: list[Device]

INLINE_PAYLOADS: int  # more than these need a table in the device's memory

def platform() -> Platform: ...
def combine(
    codec: bytes,
    payloads: list[int],
    table: int,
    position: int,
    local: int,
    local_dtype: int,
    residual_in: int,
    residual_out: int,
    numel: int,
    divisor: int,
    op: int,
    key: int,
    offset: int,
    payload_out: int,
    out: int,
    dtype: int,
    out_dtype: int,
    stream: int,
) -> None: ...
def decode(
    codec: bytes, payload: int, numel: int, dtype: int, out: int, out_dtype: int, stream: int
) -> None: ...

class GroupedCalls:
    def __init__(self, codec: bytes, dtype: int, calls: list[tuple[object, ...]], rank: int) -> None: ...
    def run(self, addresses: list[int], seed: int, stream: int) -> None: ...

# csrc/python/cuda_low_rank.cpp
MAX_VECTORS: int  # of one kernel

def orthonormalize(vectors: list[tuple[int, int, int, int]], stream: int) -> None: ...
def check_finite(factors: list[tuple[int, int, int, int, int]], stream: int) -> None: ...
def expand(
    gradient: int,
    dtype: int,
    residual: int,
    rows: int,
    columns: int,
    rank: int,
    left: int,
    right: int,
    finite: int,
    stream: int,
) -> None: ...

# csrc/python/cuda_rounded_sum.cpp
def measure_digits(
    tensor: int, dtype: int, numel: int, finite_only: bool, tops: int, lows: int, stream: int
) -> None: ...
def count_digits(ranks: int, tops: int, lows: int, blocks: int, halves: int, stream: int) -> None: ...
def split_digits(
    ranks: int,
    tops: int,
    lows: int,
    ends: int,
    tensor: int,
    dtype: int,
    numel: int,
    digits: int,
    offsets: Sequence[int],
    stream: int,
) -> None: ...
def round_digits(
    ranks: int,
    tops: int,
    lows: int,
    ends: int,
    digits: int,
    numel: int,
    divisor: int,
    dtype: int,
    out: int,
    stream: int,
) -> None: ...

# csrc/python/cuda_fused.cpp
class FusedPlan:
    def __init__(
        self,
        collective: int,
        algorithm: int,
        codec: bytes,
        dtype: int,
        numel: int,
        splits: list[int],
        op: int,
        divisor: int,
        encodes_own: bool,
        rounds_sum: bool,
        ranks: int,
        first_rank: int,
        local_ranks: int,
        buffer_layout: tuple[int, int],
        blocks: int,
        section: int,
        timeout_ns: int,
        memory: list[int],
    ) -> None: ...
    def launch(
        self, tensors: list[tuple[int, int, int, int, int]], stream: int, features: int = 0
    ) -> None: ...
