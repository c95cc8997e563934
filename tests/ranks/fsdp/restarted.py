"""The example with one rank killed in a reduce-scatter; torchrun's second attempt completes."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from dtcomm.fsdp.collectives import CompressedReduceScatter

EXAMPLE = Path(__file__).parents[3] / "examples" / "fsdp_char_gpt.py"


def main(last: int, arguments: list[str]) -> None:
    """Kill rank 1 once, in the first block's reduce-scatter number ``last``; a file beside the checkpoints tells."""
    sys.argv = [str(EXAMPLE), *arguments]
    told = Path(arguments[-1]).with_name("deaths")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        call, calls = CompressedReduceScatter.__call__, 0

        def deadly(self: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += self.module == "blocks.0"
            if calls > last:
                with open(told, "a") as deaths:
                    print("rank 1", file=deaths)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, *arguments, **named)

        CompressedReduceScatter.__call__ = deadly  # type: ignore[method-assign]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
