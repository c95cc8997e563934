"""The example, one of whose ranks is killed in a reduce-scatter; torchrun's second attempt runs through.

python restarted.py STEP, then the example's arguments.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from dtcomm.fsdp.comm import Scatter

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_char_gpt.py"


def main() -> None:
    last = int(sys.argv.pop(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        call, calls = Scatter.__call__, 0

        def deadly(self: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += self.module == "blocks.0"
            if calls > last:
                print("rank 1 dies", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, *arguments, **named)

        Scatter.__call__ = deadly  # type: ignore[method-assign]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
