"""The native core, as csrc/python binds it: one section per binding file."""

from collections.abc import Callable, Sequence
from typing import Any

# csrc/python/latency.cpp
def round_trip_ns(cpu_a: int, cpu_b: int, batches: int, trips: int) -> float: ...

# csrc/python/build_info.cpp
def build_info() -> dict[str, str]: ...

# csrc/python/kernels.cpp
def kernels() -> list[tuple[str, bool]]: ...
def kernel_variable() -> str: ...
def wire_bytes(codec: bytes, numel: int, dtype: int) -> int: ...
def granule_elements(codec: bytes) -> int: ...
def payload_error(codec: bytes, payload: int, numel: int) -> str: ...
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

class GroupedCalls:
    def __init__(self, codec: bytes, dtype: int, calls: list[tuple[object, ...]], rank: int) -> None: ...
    def run(self, kernel: str, addresses: list[int], seed: int) -> None: ...

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
def encode_lossless(kernel: str, x: int, numel: int, size: int, payload: int) -> int: ...
def decode_lossless(kernel: str, payload: int, bytes: int, numel: int, size: int, out: int) -> str: ...
def repeat_kernel(
    kernel: str,
    codec: bytes,
    payloads: list[int],
    local: int,
    residual: int,
    numel: int,
    payload_out: int,
    out: int,
    stream_payload: bool,
    stream_out: bool,
    repeats: int,
) -> None: ...

# csrc/python/epilogue.cpp
class Epilogue:
    def __init__(
        self,
        *,
        features: int,
        dtype: int,
        out: int,
        bias: int,
        addend: int,
        weight: int,
        eps: float,
        norm_out: int,
        codes: int,
        scales: int,
        groups: int,
        to_int8: bool,
    ) -> None: ...

def epilogue(kernel: str, codec: bytes, runs: list[tuple[int, int]], call: Epilogue) -> None: ...

# csrc/python/low_rank.cpp
def project_rows(
    kernel: str,
    gradient: int,
    dtype: int,
    residual: int,
    rows: int,
    columns: int,
    rank: int,
    right: int,
    left: int,
) -> None: ...
def project_columns(
    kernel: str,
    gradient: int,
    dtype: int,
    residual: int,
    rows: int,
    columns: int,
    rank: int,
    left: int,
    right: int,
) -> None: ...
def expand(
    kernel: str,
    gradient: int,
    dtype: int,
    residual: int,
    rows: int,
    columns: int,
    rank: int,
    left: int,
    right: int,
) -> None: ...
def orthonormalize(kernel: str, vectors: int, count: int, n: int, key: int) -> None: ...

# csrc/python/local_tasks.cpp
AUDIT_OK: int
AUDIT_RUN: int

class NativeTask:
    def run(self, kernel: str) -> None: ...

def task_epilogue(numel: int, call: Epilogue) -> NativeTask: ...
def task_measure_exponents(
    codec: bytes, local: int, dtype: int, residual: int, numel: int, exponents: int
) -> NativeTask: ...
def task_measure_digits(
    local: int, dtype: int, numel: int, finite_only: bool, tops: int, lows: int
) -> NativeTask: ...
def task_split_digits(
    ranks: int,
    tops: int,
    lows: int,
    local: int,
    dtype: int,
    numel: int,
    finite: bool,
    digits: int,
    offsets: Sequence[int],
) -> NativeTask: ...
def task_round_digits(
    ranks: int, tops: int, lows: int, digits: int, numel: int, divisor: int, dtype: int, out: int
) -> NativeTask: ...
def count_digits(ranks: int, tops: int, lows: int, blocks: int, parts: int) -> list[int]: ...
def task_quantize_to_exponents(
    codec: bytes,
    ranks: int,
    local: int,
    dtype: int,
    residual: int,
    numel: int,
    exponents: int,
    codes: int,
) -> NativeTask: ...
def task_dequantize(
    codec: bytes,
    ranks: int,
    codes: int,
    exponents: int,
    numel: int,
    divisor: int,
    dtype: int,
    out: int,
    verdict: int = 0,
) -> NativeTask: ...
def task_audit_checksums(bits: int, codes: int, numel: int, sums: int) -> NativeTask: ...
def task_audit_verdict(
    sums: int, other_sums: int, exponents: int, other_exponents: int, numel: int, block: int, out: int
) -> NativeTask: ...
def task_gather_values(
    codec: bytes,
    key: int,
    offset: int,
    local: int,
    dtype: int,
    residual: int,
    numel: int,
    values: int,
    residual_values: int,
) -> NativeTask: ...
def task_scatter_values(
    codec: bytes,
    key: int,
    offset: int,
    scaled: bool,
    values: int,
    numel: int,
    dtype: int,
    out: int,
) -> NativeTask: ...
def task_restore_residual(
    codec: bytes, key: int, offset: int, residual_values: int, numel: int, residual: int
) -> NativeTask: ...

# csrc/python/plan.cpp
class NativeProgram:
    def __init__(self, rank: int, ranks: int, chunks: int, boxes: list[int], flat: list[int]) -> None: ...
    @property
    def max_boxes(self) -> int: ...

class Variants:
    """How the engine carries out the operations of a plan, and what it tries instead. Results do not depend on it.

    Attributes:
        piece_bytes: Bytes of input in one piece.
        single_copy: Whether receivers copy out of the sender's memory.
        stream_payload: Whether payloads are written into slots with non-temporal stores.
        stream_output: Whether results are, where they were not read just before.
        parallel: Whether this rank uses its threads.
        threads: Threads that it may use.
        offers: Whether the operation is a message of one rank to another. If it fits into the slots, its sender does
            not wait for a receiver that comes late: a single copy is then an offer (``csrc/engine/offer.h``).
        size_class: Operations with this name are tried together; empty: nothing is tried.
        piece_sizes: Sizes to try, ``piece_bytes`` among them.
        tries_single_copy: Whether to try both values; the same for the three below.
        tries_alternative: Whether to try the operation's alternative algorithm.
    """

    piece_bytes: int
    single_copy: bool
    stream_payload: bool
    stream_output: bool
    parallel: bool
    threads: int
    offers: bool
    size_class: str
    piece_sizes: list[int]
    tries_single_copy: bool
    tries_stream_payload: bool
    tries_stream_output: bool
    tries_parallel: bool
    tries_alternative: bool
    def __init__(
        self,
        *,
        piece_bytes: int = ...,
        single_copy: bool = ...,
        stream_payload: bool = ...,
        stream_output: bool = ...,
        parallel: bool = ...,
        threads: int = ...,
        offers: bool = ...,
        size_class: str = ...,
        piece_sizes: list[int] = ...,
        tries_single_copy: bool = ...,
        tries_stream_payload: bool = ...,
        tries_stream_output: bool = ...,
        tries_parallel: bool = ...,
        tries_alternative: bool = ...,
    ) -> None: ...

class PlanSpec:
    """What a plan is made of; the fields of ``csrc/engine/plan.h``.

    Attributes:
        segments: (elements, dtype, codec, codec between hosts) of each tensor.
        max_boxes: Payloads of a rank for which the communicator has room.
        alternative: A program with the same results, which ``variants`` may try.
    """

    alternative: NativeProgram | None
    alternative_zero_copy: bool
    def __init__(
        self,
        *,
        program: NativeProgram,
        geometry: int,
        op: int,
        segments: list[tuple[int, int, bytes, bytes]],
        variants: Variants,
        slot_bytes: int,
        average: bool = False,
        text: str = "",
        zero_copy: bool = False,
        checksum: bool = False,
        max_boxes: int = ...,
        splits: list[int] = ...,
        call_info: str = "",
    ) -> None: ...

class NativePlan:
    def __init__(self, spec: PlanSpec) -> None: ...
    @property
    def max_boxes(self) -> int: ...
    @property
    def pieces(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> int: ...

def chunk_layout(
    geometry: int,
    segments: Sequence[tuple[int, int]],
    chunks: int,
    ranks: int,
    splits: Sequence[int] = ...,
    elements: int = 0,
) -> list[list[list[tuple[int, int, int, int]]]]: ...

# csrc/python/engine.cpp
class NativeWork:
    def interrupt(self) -> None: ...
    def wait(self) -> None: ...
    def finished(self) -> bool: ...
    def cancel_notify(self) -> bool: ...
    def raise_failure(self) -> None: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def finished_ns(self) -> int: ...
    def phase_times(self) -> list[tuple[int, int, int]]: ...

class Address:
    """How a rank is reached: its process and the memory that it shares, or sockets that are connected to it.

    Attributes:
        pid, page_fd, page_token, page_address: Its process, and where that shows that it lives.
        region_fd, region_token: The memory in which it publishes payloads.
        sockets: Connected to it, if its memory is not mapped; the engine owns them from now on.
        other_host: Whether it is on another host.
        name: How errors name it.
    """

    pid: int
    page_fd: int
    page_token: int
    page_address: int
    region_fd: int
    region_token: int
    sockets: list[int]
    other_host: bool
    name: str
    def __init__(
        self,
        *,
        pid: int = ...,
        page_fd: int = ...,
        page_token: int = ...,
        page_address: int = ...,
        region_fd: int = ...,
        region_token: int = ...,
        sockets: list[int] = ...,
        other_host: bool = ...,
        name: str = ...,
    ) -> None: ...

class FlightRecord:
    number: int
    text: str
    call_info: str
    stage: int
    issued_ns: int
    started_ns: int
    finished_ns: int
    waiting_for: int
    waited_for: list[int]

class NativeCommunicator:
    waiters_help_progress: bool
    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        max_boxes: int,
        slot_bytes: int,
        timeout_s: float,
        yield_us: float,
        inside: tuple[float, float, float] = ...,
        between: tuple[float, float, float] = ...,
        wide_area: bool = False,
    ) -> None: ...
    def address(self) -> dict[str, int]: ...
    def attach(self, addresses: Sequence[Address]) -> None: ...
    def make_ucx_address(self) -> bytes: ...
    def connect_ucx(self, addresses: Sequence[bytes]) -> None: ...
    def ucx_is_connected(self) -> bool: ...
    def ucx_lanes(self) -> list[str]: ...
    def allow_restoring(self, event_fd: int) -> None: ...
    def lost_connections(self) -> list[tuple[int, int, int, str]]: ...
    def restore_connection(self, peer: int, number: int, generation: int, fd: int) -> bool: ...
    def end_connection(self, peer: int, number: int, generation: int) -> None: ...
    def give_up(self, peer: int, reason: str) -> None: ...
    def restoring_counts(self) -> tuple[int, int]: ...
    def measured_rates(self) -> list[float]: ...
    def single_copy_error(self) -> str: ...
    def size_classes(self) -> list[dict[str, Any]]: ...
    def run(self, plan: NativePlan, input: int, output: int, residual: int, seed: int) -> int: ...
    def run_all(
        self,
        plan: NativePlan,
        pointers: list[tuple[int, int, int]],
        seed: int,
        before: list[NativeTask] = ...,
        after: list[NativeTask] = ...,
        agreed: int = 0,
    ) -> int: ...
    def submit(
        self,
        plan: NativePlan,
        pointers: list[tuple[int, int, int]],
        seed: int,
        before: list[NativeTask] = ...,
        after: list[NativeTask] = ...,
        agreed: int = 0,
    ) -> NativeWork: ...
    def set_tuning(self, cores_per_rank: float, always: bool) -> None: ...
    def set_wait_policy(self, spins: int, yield_us: float) -> None: ...
    def flight_records(self) -> list[FlightRecord]: ...
    def peer_snapshots(self) -> list[dict[str, Any]]: ...
    def set_timeout(self, seconds: float) -> None: ...
    def close(self) -> None: ...
    @staticmethod
    def close_all(communicators: list[NativeCommunicator]) -> None: ...
    @property
    def failure(self) -> str: ...
    @property
    def operations(self) -> int: ...
    @property
    def single_copy_bytes(self) -> int: ...
    @property
    def wire_bytes(self) -> int: ...

class CallCounter:
    def next(self) -> int: ...
    @property
    def value(self) -> int: ...

# csrc/python/repeated_calls.cpp
def initialize_tensor_reader(tensor_type: type, exchange: Any) -> None: ...
def initialize_repeated_calls(
    c10d: Any, make_work: Callable[[NativeWork, tuple[Any, ...], Any], Any]
) -> None: ...
def keep_repeated(
    arguments: tuple[Any, ...],
    communicator: NativeCommunicator,
    plan: NativePlan,
    calls: CallCounter,
    rank: int,
    has_input: bool,
    has_output: bool,
    has_residual: bool,
    failed: Callable[[Any], None],
) -> None: ...
def run_repeated(
    arguments: tuple[Any, ...],
    async_op: bool,
    seed: Any = None,
    residual: Any = None,
    epilogue: Any = None,
    /,
) -> Any: ...
def exchange_repeated(sent: tuple[Any, ...], received: tuple[Any, ...]) -> bool: ...
def send_message(sent: tuple[Any, ...], tensor: Any, tag: int) -> Any: ...
def receive_message(received: tuple[Any, ...], tensor: Any, tag: int) -> bool | None: ...
def forget_repeated() -> None: ...
def keep_format(name: Any, codec: bytes, tensor: Any, dtype: int, payload: Any) -> None: ...
def set_kernel_forced(forced: bool) -> None: ...
def encode_repeated(codec: Any, x: Any, key: Any, offset: Any, out: Any) -> bool: ...
def decode_repeated(codec: Any, payload: Any, numel: Any, dtype: Any, out: Any) -> bool: ...

class SharedTensorMemory:
    def __init__(self, bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

# csrc/python/simulated_world.cpp
def run_simulated(
    *,
    ranks: int,
    seed: int,
    max_boxes: int,
    slot_bytes: int,
    delay: float,
    crash_rank: int,
    crash_after: int,
    flip_box: int,
    calls: list[list[Any]],
) -> list[tuple[int, int, int, int, list[dict[str, Any]]]]: ...

# csrc/python/engine.cpp
def set_engine_kernels(name: str) -> None: ...
def engine_kernels() -> str: ...

class EmulatedNic:
    def __init__(self, level: int) -> None: ...
    def send(self, now: int, busy_ns: int) -> int: ...
    def receive(self, first: int, busy_ns: int) -> int: ...

def crc32c(data: int, bytes: int, hardware: bool = True) -> int: ...
def open_ucx(libraries: Sequence[str]) -> tuple[str, list[str]]: ...

class UcxPeer:
    def __init__(self, token: int) -> None: ...
    def address(self) -> bytes: ...
    def connect(self, number: int, own_number: int, address: bytes) -> None: ...
    def send(self, kind: int, words: Sequence[int], payload: bytes = ..., is_text: bool = False) -> None: ...
    def receive(self) -> list[tuple[int, list[int], bytes]]: ...
    @property
    def end_reason(self) -> str: ...

def enable_phase_times(enabled: bool) -> None: ...
def crc32c_in_hardware() -> bool: ...
def notify(work: NativeWork, ticket: int) -> None: ...
def next_completion() -> int | None: ...
def stop() -> None: ...
def share_cores() -> None: ...
def helper_threads() -> int: ...

# csrc/python/fused.cpp
MAX_RANKS: int
MAX_BLOCKS: int
MISSING_OFFSET: int
PAD_BYTES: int

def fused_bytes(ranks: int, buffer_layout: tuple[int, int]) -> int: ...
def fusible(codec: bytes, dtype: int) -> bool: ...

# csrc/python/weight_delta.cpp
class DeltaWriter:
    def __init__(self, kind: int, numel: int) -> None: ...
    def add(self, kernel: str, first: int, n: int, old: int, fresh: int, threads: int) -> int: ...
    @property
    def bytes(self) -> int: ...
    def write(self, to: int) -> None: ...

class DeltaReader:
    def __init__(self, payload: int, bytes: int) -> None: ...
    @property
    def error(self) -> str: ...
    @property
    def kind(self) -> int: ...
    @property
    def numel(self) -> int: ...
    def decode(
        self, kernel: str, first: int, n: int, old: int, out: int, threads: int, checked: bool
    ) -> str: ...
