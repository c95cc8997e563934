"""Weight deltas: bits for each changed weight after training steps, speed on one core, time over a long link."""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.common import delayed_link, netns
from dtcomm.extensions.weights import Publisher, Subscriber
from dtcomm.extensions.weights.codec import decode, encode
from dtcomm.launch.ranks import run_ranks

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 320, 6, 8, 128, 8


class GPT(nn.Module):
    """7.6 million parameters, on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.body(self.tokens(x) + self.places.weight, mask=mask, is_causal=True))


def versions(steps: int, rates: list[float]) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """Train, then take for each learning rate the bf16 weights before and after the last of four steps."""
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
        rows = torch.stack([text[i : i + CONTEXT + 1] for i in starts])
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def weights() -> torch.Tensor:
        return torch.cat([p.detach().to(torch.bfloat16).flatten() for p in model.parameters()])

    for i in range(steps):
        step(1e-3 * min(1.0, (i + 1) / 30))
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    taken = []
    for rate in rates:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        for _ in range(3):
            step(rate)
        old = weights()
        step(rate)
        taken.append((rate, old, weights()))
    return taken


def print_bits(rate: float, old: torch.Tensor, new: torch.Tensor) -> None:
    """One row: bits for each changed weight."""
    a, b = old.view(torch.int16), new.view(torch.int16)
    places = (a != b).nonzero().flatten()
    changed = len(places)
    gaps = torch.diff(places, prepend=torch.tensor([-1])).clamp(max=65_535).to(torch.uint16)
    xors = (a ^ b)[places]
    listed = len(zlib.compress(gaps.numpy().tobytes() + xors.numpy().tobytes(), 6)) * 8 / changed
    dense = len(zlib.compress((a ^ b).numpy().tobytes(), 6)) * 8 / changed
    own = encode(old, new)[0].numel() * 8 / changed
    share = 100 * changed / len(a)
    print(f"| {rate:g} | {share:.2f} % | 48 | {dense:.1f} | {listed:.1f} | {own:.2f} |", flush=True)


def rounds(function: Callable[[], object], size: int) -> str:
    """Median and range of three rounds in GB/s, and the same by CPU time."""
    found = []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        found.append((size / 1e9 / (time.perf_counter() - wall), size / 1e9 / (time.process_time() - cpu)))
    wall_rates, cpu_rates = sorted(f[0] for f in found), [f[1] for f in found]
    return (
        f"{statistics.median(wall_rates):.2f} [{wall_rates[0]:.2f}, {wall_rates[-1]:.2f}] "
        f"| {statistics.median(cpu_rates):.2f}"
    )


def over_link(
    rank: int, ranks: int, folder: str, hosts: list[str], sizes: list[int], connections: int, gbit: float
) -> list[tuple[str, float, float, float]]:
    """Publish random bytes from the first host; on the second, return how long each version took."""
    netns.enter_namespace(hosts[rank])
    torch.set_num_threads(1)
    begun, done = Path(folder) / "begun", Path(folder) / "done"
    taken = []
    for size in sizes:
        weights = {f"w{i}": torch.zeros(size // 8, dtype=torch.uint8) for i in range(8)}
        address = f"10.77.0.1:{29500 + sizes.index(size)}"
        trainer = Publisher(weights, listen=address, part_bytes=4 << 20) if rank == 0 else None
        engine = Subscriber(weights, f"tcp://{address}", connections=connections) if rank else None
        for version in range(1, 5 if size < 1e8 else 3):
            if trainer is not None:
                for tensor in weights.values():
                    tensor.random_(256)
                time.sleep(0.5)  # the engine waits
                begun.write_text(str(time.monotonic()))
                trainer.publish(version)
                while not (done.exists() and done.read_text() == f"{size} {version}"):
                    time.sleep(0.01)
            elif engine is not None:
                engine.update(at_least=version)
                ended = time.monotonic()
                done.write_text(f"{size} {version}")
                whole = size / 1e9 * 8 / gbit * 9038 / 8948  # of packets of 9000 bytes
                name = f"{size / 1e6:g} MB, " + ("first version" if version == 1 else f"version {version}")
                taken.append((name, whole, engine.report()["receive_s"], ended - float(begun.read_text())))
    return taken


def print_link(gbit: float, round_trip_ms: float, control: str, connections: int) -> None:
    """Rows: the bytes at the rate of the link, receiving, and all from publish() to the new weights."""
    with delayed_link.two_sites(gbit, round_trip_ms, congestion_control=control) as hosts:
        with tempfile.TemporaryDirectory() as folder:
            sizes = [12_000_000, 400_000_000] if gbit >= 1 else [12_000_000]
            arguments = (folder, hosts, sizes, connections, gbit)
            taken = run_ranks(over_link, 2, *arguments, backend=None, timeout=240)[1]
    for name, whole, receive, total in taken:
        print(f"| {name}, {control} | {whole:.3f} | {receive:.3f} | {total:.3f} |", flush=True)


def main() -> None:
    """Print all tables, or that of a link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="training steps before the measured ones")
    parser.add_argument("--elements", type=int, default=1 << 26, help="of the tensors that are timed")
    parser.add_argument("--link", metavar="CONTROL", help="measure a long link with cubic or bbr, only")
    parser.add_argument("--gbit", type=float, default=1, help="of the link, in Gbit/s; below 1: only 12 MB")
    parser.add_argument("--round-trip", type=float, default=75, help="of the link, in ms")
    parser.add_argument("--connections", type=int, default=4, help="over the link")
    options = parser.parse_args()
    if options.link:
        print_link(options.gbit, options.round_trip, options.link, options.connections)
        return
    torch.manual_seed(0)
    master = torch.randn(1 << 24) * 0.02
    new = (master + 1.7e-6 * (torch.randn(1 << 24) * 0.5).clamp(-1, 1)).bfloat16()
    copies = options.elements >> 24
    old, new = master.bfloat16().repeat(copies), new.repeat(copies)
    out, payload, none = torch.empty_like(old), encode(old, new)[0], encode(old, old)[0]
    rows: dict[str, Callable[[], object]] = {
        "copy (torch)": lambda: out.copy_(old),
        "encode": lambda: encode(old, new, threads=1),
        "decode to another tensor": lambda: decode(old, payload, out, threads=1),
        "apply in place, checked before": lambda: decode(out, payload, out, threads=1, checked=True),
        "encode, nothing changed": lambda: encode(old, old, threads=1),
        "decode to another tensor, nothing changed": lambda: decode(old, none, out, threads=1),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    share = 100 * int((old.view(torch.int16) != new.view(torch.int16)).sum()) / old.numel()
    print(f"{share:.2f} % changed, {payload.numel() * 800 / share / old.numel():.2f} bits each")
    for name, function in rows.items():
        function()
        print(f"| {name} | {rounds(function, old.nbytes)} |", flush=True)
    torch.set_num_threads(threads)
    for rate, before, after in versions(options.steps, [1e-6, 2e-6, 3e-6, 1e-5, 3e-5]):
        print_bits(rate, before, after)


if __name__ == "__main__":
    main()
