"""The native core, as csrc/python binds it: one section per binding file."""

# csrc/python/build_info.cpp
def build_info() -> dict[str, str]: ...

# csrc/python/kernels.cpp
def kernels() -> list[tuple[str, bool]]: ...
def wire_bytes(codec: bytes, numel: int, dtype: int) -> int: ...
def granule_elements(codec: bytes) -> int: ...
def mix_key(seed: int, rank: int, step: int) -> int: ...
def combine(
    kernel: str,
    codec: bytes,
    payloads: list[int],
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
    stream_payload: bool,
    stream_out: bool,
) -> None: ...
def decode(
    kernel: str,
    codec: bytes,
    payload: int,
    numel: int,
    dtype: int,
    out: int,
    out_dtype: int,
    stream: bool,
) -> None: ...
