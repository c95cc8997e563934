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
        buffer_layout: tuple[int, int, int],
        blocks: int,
        section: int,
        timeout_ns: int,
        memory: list[int],
        programs: list[tuple[int, list[int], list[int], list[int]]] = ...,
        steps: int = 0,
        keeps_sums: bool = False,
        inboxes: list[list[tuple[int, int]]] = ...,
    ) -> None: ...
    def launch(
        self,
        tensors: list[tuple[int, int, int, int, int]],
        seed: int = 0,
        absent: int = -1,
        features: int = 0,
    ) -> None: ...
