"""Command ``dtcomm coordinator``: the process that knows which ranks of an elastic training run take part."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from types import FrameType

from dtcomm import env
from dtcomm.extensions.elastic.coordinator import Coordinator
from dtcomm.extensions.elastic.protocol import parse_address


def main(argv: list[str]) -> int:
    """Run the command until SIGINT or SIGTERM; return 0, or 2 if an argument is wrong or the port is in use."""
    parser = argparse.ArgumentParser(
        prog="dtcomm coordinator",
        description="Serve the ranks of one training run with ElasticLocalSGD. It holds no weights. Ranks that do not"
        " know DTCOMM_SECRET are refused; the stores of its views listen on the ports of DTCOMM_PORTS.",
    )
    parser.add_argument(
        "--listen",
        default="[::]:29400",
        help="address and port, host:port or [IPv6 address]:port (default: %(default)s, all addresses)",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="how many ranks the first group waits for (default: 1)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        help="seconds after which a silent rank counts as gone (default: 30)",
    )
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    try:
        host, port = parse_address(options.listen, "--listen")
        host = "" if host == "::" else host
        coordinator = Coordinator(host, port, ranks=options.ranks, timeout_s=options.timeout)
    except (OSError, ValueError) as error:
        print(f"dtcomm coordinator: {error}", file=sys.stderr)
        return 2

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    secret = "with" if env.get("DTCOMM_SECRET") else "without"
    print(f"dtcomm coordinator at {coordinator.address}, {secret} DTCOMM_SECRET", flush=True)
    try:
        coordinator.wait()
    except KeyboardInterrupt:
        coordinator.close()
    return 0
