"""The emulator of fused CUDA collectives, as csrc/python/emulator.cpp binds it; an optional module."""

class FusedCall:
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
        rounds: bool,
        ranks: int,
        first: int,
        here: int,
        room: tuple[int, int, int],
        blocks: int,
        section: int,
        budget: int,
        memory: list[int],
        programs: list[tuple[int, list[int], list[int], list[int]]] = ...,
        steps: int = 0,
        keeps: bool = False,
    ) -> None: ...
    def why_not(self) -> str: ...
    def launch(
        self,
        shares: list[tuple[int, int, int, int, int]],
        order: int = 0,
        absent: int = -1,
        features: int = 0,
    ) -> None: ...
