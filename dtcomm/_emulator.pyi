"""The emulator of fused CUDA collectives, as csrc/python/emulator.cpp binds it; an optional module."""

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
        self,
        tensors: list[tuple[int, int, int, int, int]],
        seed: int = 0,
        absent: int = -1,
        features: int = 0,
    ) -> None: ...
