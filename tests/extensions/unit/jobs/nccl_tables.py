"""Published nccl-tests tables of all_reduce, in microseconds by size, to compare `dtcomm plan` with.

Calibrated on: the first, and the 8-byte rows (`Device.launch_us`). The others were seen while constants
were chosen, but never fitted one by one; the constants that are ours (`nccl.FILL`, `LL_REACHED`,
`LANES_REACH`) are the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtcomm.cli import parse_size

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Published:
    name: str
    system: str
    hosts: int
    times: dict[int, float]


def _doubling(times: str) -> dict[int, float]:
    # From 1 KB on.
    return {KB << at: float(time) for at, time in enumerate(times.split())}


def _busbw(ranks: int, table: str) -> dict[int, float]:
    # Pairs of a size and its bus bandwidth.
    words = table.split()
    pairs = ((parse_size(size), float(busbw)) for size, busbw in zip(words[::2], words[1::2]))
    return {size: size * 2 * (ranks - 1) / ranks / (busbw * 1e3) for size, busbw in pairs}


_TIMES = {
    ("8 x A100 (the calibration)", "a100", 1): _busbw(
        8, "32K 1.31 1M 18 8M 109.9 64M 171.5 512M 222.7 1G 229 16G 234.9"
    ),
    ("8 x A100, Oracle's GPU cluster tutorial", "a100", 1): _doubling(
        "32.03 31.77 32.13 32.22 32.48 32.02 35.4 38.5 45.21 58.96 76.71 112.4 134.5 185.8 245.1 398.2 "
        "589.5 1191.2 2121.9 4208.2 8166.8 16232 32097 63929"
    ),
    ("2 x 8 A100, Oracle's OKE quick start", "a100", 2): _doubling(
        "41.97 43.36 44.54 48.16 49.4 49.66 51.69 54.86 67.95 73.94 85.58 99.19 127 174.3 282.7 452.3 "
        "821.7 1542 3042.7 6436 9187.8 18289 34176 67689"
    ),
    ("2 x 8 A100, a Kubernetes exercise that expects 189 GB/s", "a100", 2): _doubling(
        "40.92 42.87 41.82 46.31 58.1 58.73 60.01 63.71 68.25 80.23 96.39 128.6 148.1 211.1 333.4 615.6 "
        "932.6 1672.7 3013.5 5702 11063 21637 42758 85129"
    ),
    ("8 x H100, NVIDIA's microbenchmark recipe", "h100", 1): _doubling(
        "16.94 17.14 17.0 17.4 17.93 19.33 19.54 19.89 20.43 20.66 27.37 42.21 54.19 83.04 123.8 199.3 "
        "324.7 586.4 1112.5 2151 4029.4 7939.1 15749 31307 62648"
    ),
    ("2 x 8 H100, nccl-tests issue 309", "h100", 2): _doubling(
        "29.75 28.19 30.24 32.12 32.74 34.1 33.84 38.77 48.67 77.69 71.93 76.24 94.38 132.6 185.4 267.9 "
        "466.1 748.3 1282.8 2357.6 4484.9 8729.8 17262 34381 68652"
    ),
    ("2 x 8 H100, dstack's page on Nebius", "h100", 2): _doubling(
        "31.36 32.27 36.04 37.24 37.22 43.82 37.85 43.1 58.59 97.88 87.08 99.06 110.14 154.48 210.33 "
        "274.23 472.43 759.58 1305.66 2379.38 4511.97 8776.26 17407.8 34448.4"
    ),
    ("4 x 8 H100, nccl-tests issue 309", "h100", 4): _doubling(
        "37.1 39.59 42.18 46.84 48.51 49.13 50.83 55.87 67.82 72.88 82.17 132.2 151.1 217.3 259.6 376 "
        "579.1 990.7 1768 3109 5808.8 11508 22890 45606 90986"
    ),
    ("2 x 8 H200, a report on BlueField-3", "h200", 2): _doubling(
        "45.06 43.84 43.51 47.64 53.65 64.93 70.32 81.24 63.59 80.78 76.86 86.37 106.13 149.76 304.32 "
        "276.88 461.01 742.13 1275.21 2327.12 4388.55 8497.37 16715.2 33169.3 66326.9"
    ),
    ("8 x B200, a cluster's acceptance report", "b200", 1): _doubling(
        "25.47 25.98 26.37 26.44 26.69 27.41 28.39 28.9 29.22 29.63 30.1 34.29 56.17 76.96 106.99 169.72 "
        "277.18 394.59 712.6 1334.6 2601.84 4605.28 9026.71 17919.9 35667.8"
    ),
    ("2 x 8 B200, the same report", "b200", 2): _doubling(
        "37.54 38.87 39.96 41.72 42.31 43.57 44.27 64.46 65.66 77.88 93.41 104.94 111.68 136.2 190.47 "
        "249.24 346.14 597.27 927.12 1619.97 3016.62 5805.86 11382.9 22540.8 44870.6"
    ),
}
TABLES = tuple(Published(*system, times) for system, times in _TIMES.items())


def errors(table: Published) -> dict[int, float]:
    """Return the relative error of the predicted bus bandwidth by size."""
    from dtcomm.extensions.jobs import hardware, nccl_model

    system = hardware.find_system(table.system).resized(table.hosts, 8)
    return {
        size: time / (nccl_model.choose("all_reduce", system, size).seconds * 1e6) - 1
        for size, time in table.times.items()
    }


if __name__ == "__main__":
    import statistics

    print("| table | median error | from 1 MB on | at 1 GB |\n|---|---|---|---|")
    for table in TABLES:
        found = errors(table)
        large = [abs(error) for size, error in found.items() if size >= MB]
        every = statistics.median(map(abs, found.values()))
        print(f"| {table.name} | {every:.0%} | {statistics.median(large):.0%} | {found[GB]:+.0%} |")
    print("\n| size | published busbw | predicted | error |\n|---|---|---|---|")
    for size, error in errors(TABLES[0]).items():
        busbw = size * 2 * 7 / 8 / TABLES[0].times[size] / 1e3
        print(f"| {size // KB} KB | {busbw:.2f} | {busbw * (1 + error):.2f} | {error:+.0%} |")
