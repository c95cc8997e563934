"""``--device`` and ``--virtual``: where the measured tensors are, and what goes with that."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from dtcomm import algorithms
from dtcomm.cli.perf import placement
from dtcomm.cli.perf.backends import registry
from dtcomm.cli.perf.collectives import DTYPES
from dtcomm.cli.perf.placement import CPU, CUDA, EMULATOR
from dtcomm.codecs import codec
from dtcomm.runtime.cuda_peer.launch import MOST_RANKS, why_not
from dtcomm.runtime.types import OpSpec, TensorSpec
from dtcomm.schedule import Schedule

if TYPE_CHECKING:
    from dtcomm.cli.perf.options import Variant

CHOOSERS = ("auto", "direct")
VIRTUAL = "virtual"  # what stands for a backend in the table where ranks are virtual


def choose(given: argparse.Namespace, compare: tuple[str, ...], schedule: Schedule | None) -> tuple[str, str]:
    """The device, and why it is that where nobody named one.

    ValueError names the argument that does not go with it, and what is valid.
    """
    if given.virtual:
        return _virtual(given, compare, schedule), ""
    device, why = given.device, ""
    named = [*_named(given), *compare]
    if device is None:
        device, why = _default(named)
    if device == EMULATOR:
        raise ValueError("--device emulator: is for --virtual N; without it, valid: cpu, cuda")
    if device == CUDA and not placement.found():
        raise ValueError(
            "--device cuda: torch sees no CUDA device; valid here: cpu, and emulator with --virtual N"
        )
    for name in named:
        if device not in registry.find(name).devices:
            argument = "--compare" if name in compare else "--backend"
            valid = registry.names(device)
            valid = [each for each in registry.PEERS if each in valid] if name in compare else valid
            raise ValueError(
                f"{argument} {name}: has no {device} tensors; on that device: {', '.join(valid)}"
            )
    if given.cudagraph and device != CUDA:
        raise ValueError(f"-G {given.cudagraph}: CUDA graphs need --device cuda or --virtual N, not {device}")
    if given.cudagraph and given.blocking:
        raise ValueError(f"-z 1: the calls of a graph (-G {given.cudagraph}) have no barrier between them")
    return device, why


def ranks(device: str) -> int:
    """How many local ranks to start where nobody says: one for each GPU, at least two."""
    return max(2, torch.cuda.device_count()) if device == CUDA else 2


def backends(given: argparse.Namespace, device: str) -> list[str]:
    """What is measured: what was named, or dtcomm."""
    if given.virtual:
        return [VIRTUAL]
    return _named(given) or ["dtcomm" if device == CUDA else "native"]


def why_no_kernel(collective: str, variant: Variant, datatype: str, op: str) -> str | None:
    """Why virtual ranks have no kernel for it; None where they have one."""
    name = "one_shot" if variant.algorithm in CHOOSERS else variant.algorithm
    schedule = variant.schedule or algorithms.build(name, collective, 2)
    part = TensorSpec(1, DTYPES[datatype], codec(variant.codec))
    shape = OpSpec(collective, "sum" if op == "none" else op, (part,), name)
    reason = why_not(shape, schedule.ranks, schedule)
    return f"--virtual: {reason}" if reason else None


def _named(given: argparse.Namespace) -> list[str]:
    return [name for part in given.backend or [] for name in part.split(",")]


def _default(named: list[str]) -> tuple[str, str]:
    if not placement.found():
        return CPU, ""
    if any(CUDA not in registry.find(name).devices for name in named):
        return CPU, "a backend that was named has CPU tensors alone"
    return CUDA, "torch sees a GPU; --device cpu measures CPU tensors"


def _virtual(given: argparse.Namespace, compare: tuple[str, ...], schedule: Schedule | None) -> str:
    """The device of virtual ranks; ValueError names what does not go with them."""
    if not 2 <= given.virtual <= MOST_RANKS:
        raise ValueError(f"--virtual {given.virtual}: expected 2 to {MOST_RANKS} ranks")
    device: str = given.device or CUDA
    if device == CPU:
        raise ValueError("--device cpu: virtual ranks run on cuda, or on the CPU in the kernels' emulator")
    if device == CUDA and not placement.found():
        raise ValueError(
            f"--virtual {given.virtual}: torch sees no CUDA device; --device emulator runs the kernels' source on the "
            "CPU, where times say nothing about a device"
        )
    for argument, value in (
        ("--backend", given.backend),
        ("--compare", compare),
        ("--nproc", given.nproc),
        ("--pin", given.pin),
    ):
        if value:
            raise ValueError(f"{argument}: with --virtual one process measures the fused kernels alone")
    if given.agg_iters != 1 or given.blocking:
        raise ValueError("--virtual: is measured without -m and -z")
    valid = algorithms.collectives()
    if given.collective not in valid:
        raise ValueError(f"--virtual: {given.collective} has no fused kernel; valid: {', '.join(valid)}")
    if schedule is not None and schedule.ranks != given.virtual:
        raise ValueError(f"--virtual {given.virtual}: --schedule is for {schedule.ranks} ranks")
    return device
