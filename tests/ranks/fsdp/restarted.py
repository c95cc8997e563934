"""The example with one rank killed in a reduce-scatter; torchrun's second attempt completes."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from dtcomm.fsdp.collectives import CompressedReduceScatter

EXAMPLE = Path(__file__).parents[3] / "examples" / "fsdp2.py"


def main(survived_calls: int, arguments: list[str]) -> None:
    """Run the example, with rank 1 killed in the first attempt after ``survived_calls`` reduce-scatters of a block.

    The file ``deaths`` beside the checkpoints records the kill.
    """
    sys.argv = [str(EXAMPLE), *arguments]
    marker = Path(arguments[-1]).with_name("deaths")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        call, calls = CompressedReduceScatter.__call__, 0

        def call_or_die(self: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += self.module == "3"
            if calls > survived_calls:
                with open(marker, "a") as deaths:
                    print("rank 1", file=deaths)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, *arguments, **options)

        CompressedReduceScatter.__call__ = call_or_die  # type: ignore[method-assign]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
