"""``dtcomm weights``: patches of checkpoint files, and a server of versions."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtcomm.cli import write_json
from dtcomm.errors import DtcommError
from dtcomm.extensions.weights import store as stores
from dtcomm.extensions.weights.files import Index
from dtcomm.extensions.weights.patch import Patch, apply, diff
from dtcomm.system import write_file


def main(argv: list[str]) -> int:
    """Run ``dtcomm weights``; return 1 if a patch is refused or a file cannot be used."""
    parser = argparse.ArgumentParser(
        prog="dtcomm weights",
        description="Patches between files of safetensors or torch.save, and a server of published versions.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("diff", help="write the patch that turns one checkpoint into another")
    command.add_argument("old", help="the base; - for a patch that holds whole weights")
    command.add_argument("new", help="the new checkpoint")
    command.add_argument("patch", help="the file to write")
    command.add_argument("--base", type=int, default=0, help="number of the base (default: 0)")
    command.add_argument("--version", type=int, default=1, help="number of the new version (default: 1)")
    command.add_argument("--model", default="", help="a name of the model that the patch carries")
    command.set_defaults(run=_diff)
    command = commands.add_parser("apply", help="apply a patch to a checkpoint")
    command.add_argument("checkpoint", help="the base")
    command.add_argument("patches", nargs="+", metavar="patch", help="all patches of the version")
    command.add_argument(
        "--out", help="the file to write (default: the checkpoint, which is replaced at once)"
    )
    command.add_argument("--model", default="", help="refuse patches of another model")
    command.set_defaults(run=_apply)
    command = commands.add_parser("inspect", help="say what a patch or a store holds")
    command.add_argument("source", help="a patch, or a folder, URL of fsspec or tcp://host:port")
    command.set_defaults(run=_inspect)
    command = commands.add_parser("serve", help="serve a store over TCP, or relay another server")
    command.add_argument("store", help="a folder or a URL of fsspec")
    command.add_argument("--listen", default="0.0.0.0:29500", help="host:port (default: %(default)s)")
    command.add_argument("--upstream", help="tcp://host:port of a server that is copied into the store")
    command.add_argument("--timeout", type=float, default=60.0,
        help="seconds after which a silent connection ends (default: 60)")  # fmt: skip
    command.set_defaults(run=_serve)
    for each in commands.choices.values():
        each.add_argument(
            "--json", nargs="?", const="-", help="write figures as JSON to a file, - for stdout"
        )
    options = parser.parse_args(argv)
    try:
        figures = options.run(options)
    except (DtcommError, OSError, ValueError) as error:
        print(f"dtcomm weights {options.command}: {error}", file=sys.stderr)
        return 1
    if write_json(figures, options.json):
        for name, value in figures.items():
            print(f"{name}: {value}")
    return 0


def _load(path: str) -> dict[str, Tensor]:
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return dict(load_file(path))
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{path}: expected tensors by name, as of model.state_dict()")
    return state


def _save(path: str, state: dict[str, Tensor], source: str) -> None:
    if path.endswith(".safetensors"):
        from safetensors import safe_open
        from safetensors.torch import save

        metadata = None
        if source.endswith(".safetensors"):
            with safe_open(source, "pt") as file:
                metadata = file.metadata()
        write_file(path, save(state, metadata))
        return
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_file(path, buffer.getvalue())


def _describe(patch: Patch) -> dict[str, Any]:
    numel = sum(entry.numel for entry in patch.entries)
    changed = sum(entry.changed for entry in patch.entries) if patch.base is not None else numel
    size = patch.starts[-1]
    return {
        "model": patch.model,
        "base": patch.base,
        "version": patch.version,
        "tensors": len(patch.entries),
        "elements": numel,
        "changed": changed,
        "bytes": size,
        "bits_per_changed": round(size * 8 / changed, 2) if changed else None,
    }


def _diff(options: argparse.Namespace) -> dict[str, Any]:
    old = None if options.old == "-" else _load(options.old)
    numbers = {"base": options.base, "version": options.version, "model": options.model}
    patch = diff(old, _load(options.new), **numbers)
    write_file(options.patch, patch)
    return _describe(Patch.read(patch, head_only=True))


def _apply(options: argparse.Namespace) -> dict[str, Any]:
    state = _load(options.checkpoint)
    patches = [Path(path).read_bytes() for path in options.patches]
    version = apply(state, patches, model=options.model)
    out = options.out or options.checkpoint
    _save(out, state, options.checkpoint)
    return {"version": version, "file": out}


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    if Path(options.source).is_file():
        patch = Patch.read(Path(options.source).read_bytes())
        tensors = {
            f"{entry.name} {list(entry.offset)}": f"{entry.dtype} {list(entry.shape)} {entry.coding} {entry.size}"
            for entry in patch.entries
        }
        return {**_describe(patch), **tensors}
    source = stores.open_store(options.source)
    releases = Index.read(source.index()).releases
    return {
        f"version {each.version}": {"base": each.base, "patches": len(each.parts), "bytes": each.size}
        for each in sorted(releases, key=lambda each: (each.version, each.base is None))
    }


def _serve(options: argparse.Namespace) -> dict[str, Any]:
    server = stores.Server(
        options.store, options.listen, upstream=options.upstream, timeout_s=options.timeout
    )
    print(f"dtcomm weights at {server.address}", file=sys.stderr, flush=True)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        while not ended.wait(1.0):
            pass
    except KeyboardInterrupt:
        pass
    server.close()
    return {"address": server.address}
