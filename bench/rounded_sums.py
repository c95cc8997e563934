"""Compare the sums of exact:rounded=true with math.fsum: adversarial channels for 2 to 64 ranks, all in one process.

python -m bench.rounded_sums [--channels N] [--ranks N ...] [--seed N] [--json FILE]

A channel is one element of all ranks. The kernels of this CPU make and add the digits as the ranks would. math.fsum
rounds to fp64; where its result is a tie of fp32, what it has dropped decides. The exit status is 1 if a sum is wrong.
Beside them stand the shares of right sums in fp32 in rank order, and in fp64. Results do not depend on the machine, so
--repeat has no effect.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch

from bench.common import harness, report
from dtcomm.kernels import local_tasks

CHANNELS = 1 << 24  # of all numbers of ranks together
RANKS = (2, 3, 4, 8, 16, 32, 64)
RUN = 1 << 14  # channels that are made at once, of one kind

Draw = Callable[[torch.Generator, int], torch.Tensor]


def _normal(generator: torch.Generator, ranks: int) -> torch.Tensor:
    return torch.randn(ranks, RUN, generator=generator)


def _outliers(generator: torch.Generator, ranks: int) -> torch.Tensor:
    x = _normal(generator, ranks)
    return torch.where(torch.rand(ranks, RUN, generator=generator) < 0.005, x * 64, x)


def _wide(generator: torch.Generator, ranks: int) -> torch.Tensor:
    exponents = torch.randint(-149, 100, (ranks, RUN), generator=generator)
    return (torch.rand(ranks, RUN, generator=generator).double() * 2 - 1).mul_(torch.exp2(exponents)).float()


def _cancelling(generator: torch.Generator, ranks: int) -> torch.Tensor:
    x = _normal(generator, ranks) * 2.0**60
    x[1::2] = -x[: ranks // 2 * 2 : 2] + _normal(generator, ranks)[1::2] * 2.0**30
    return x


def _ties(generator: torch.Generator, ranks: int) -> torch.Tensor:
    """Half a unit in the last place beside a number, and in some channels a bit far below that decides."""
    x = torch.zeros(ranks, RUN)
    x[0] = torch.randint(1 << 23, 1 << 24, (RUN,), generator=generator).float()
    x[1] = 0.5 * (1 - 2 * torch.randint(0, 2, (RUN,), generator=generator))
    if ranks > 2:
        x[2:] = torch.randint(-1, 2, (ranks - 2, RUN), generator=generator) * 2.0**-100
    return x * torch.exp2(torch.randint(-40, 40, (RUN,), generator=generator))


KINDS: dict[str, Draw] = {
    "normal": _normal,
    "outliers x 64": _outliers,
    "wide": _wide,
    "cancelling": _cancelling,
    "ties": _ties,
    "subnormal": lambda generator, ranks: _normal(generator, ranks) * 2.0**-140,
}


def right_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the fp32 numbers nearest to the sums of the columns."""
    columns = x.double().numpy().T.tolist()
    sums = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
    right = sums.float()
    for i in (sums.view(torch.int64) & 0x1FFFFFFF == 0x10000000).nonzero().flatten().tolist():
        error = math.fsum([*columns[i], -float(sums[i])])
        if error:  # the exact sum is on one side of the tie
            away = torch.nextafter(sums[i], torch.tensor(math.copysign(math.inf, error), dtype=torch.float64))
            right[i] = away.float()
    return right


def main(arguments: list[str] | None = None) -> int:
    """Compare and print."""
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--channels", type=int, default=CHANNELS, help="of all numbers of ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="the numbers of ranks")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other channels")
    options = harness.parse(parser, arguments)
    results = harness.Results(options)
    channels = RUN * len(options.ranks) * len(KINDS) if options.quick else options.channels
    generator = torch.Generator().manual_seed(options.seed)
    lines, wrong = [], 0
    for ranks in options.ranks:
        counts = dict.fromkeys(("channels", "rounded", "fp32", "fp64"), 0)
        for run in range(max(1, round(channels / RUN / len(options.ranks)))):
            x = list(KINDS.values())[run % len(KINDS)](generator, ranks)
            right = right_sums(x)
            in_order = x[0].clone()
            for row in x[1:]:
                in_order += row
            counts["channels"] += RUN
            counts["rounded"] += int((local_tasks.sum_rounded(x)[0] == right).sum())
            counts["fp32"] += int((in_order == right).sum())
            counts["fp64"] += int((x.double().sum(0).float() == right).sum())
        wrong += counts["channels"] - counts["rounded"]
        results.rows.append({"ranks": ranks, **counts})
        shares = (f"{100 * counts[name] / counts['channels']:.4f} %" for name in ("fp32", "fp64"))
        lines.append([str(ranks), f"{counts['channels']:,}", f"{counts['rounded']:,}", *shares])
    report.table(
        "correctly rounded sums", ["ranks", "channels", "right", "right in fp32", "right in fp64"], lines
    )
    return max(results.finish(), int(wrong > 0))


if __name__ == "__main__":
    sys.exit(main())
