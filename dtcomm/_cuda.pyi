"""The CUDA kernels, as csrc/python/cuda*.cpp binds them; this module exists where nvcc was found."""

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

def platform() -> Platform: ...
def encode(
    codec: bytes, x: int, dtype: int, numel: int, key: int, offset: int, payload: int, stream: int
) -> None: ...
def decode(
    codec: bytes, payload: int, numel: int, dtype: int, out: int, out_dtype: int, stream: int
) -> None: ...
