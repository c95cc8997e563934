"""``dtcomm run``: runs a training script and compresses the DDP and FSDP2 modules that it makes.

    torchrun --nproc-per-node 2 -m dtcomm run --codec int8 train.py --epochs 3
    dtcomm run --nproc-per-node 2 --codec int8 train.py --epochs 3

A module is compressed before the first forward pass that it is in, because the script may register a communication hook
or call `dtcomm.ddp.compress` itself until then; such a module is left alone. At the end rank 0 prints the reports.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import runpy
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, fsdp, torch_compat
from dtcomm.cli import count_argument, write_json
from dtcomm.compress.guard import ACTIONS, Guard
from dtcomm.compress.report import Report
from dtcomm.compress.reporting import Reporting
from dtcomm.fsdp.options import FEEDBACKS, PARAMETER_PREFIXES, parse_spec

FEEDBACK = {"on": True, "off": False, "auto": "auto", "ef21": "ef21", "diana": "diana"}


def main(argv: Sequence[str]) -> int:
    """Run a script with compression, or start torchrun, whose ranks do so."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    for_ddp, for_fsdp = _options(arguments)
    try:
        _check(for_ddp, for_fsdp)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if not arguments.module and not os.path.isfile(arguments.script):
        parser.error(f"script: there is no file {arguments.script!r}; for a module use -m {arguments.script}")
    if arguments.nproc_per_node and "RANK" not in os.environ:
        torchrun = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            arguments.nproc_per_node,
        )
        os.execv(sys.executable, [sys.executable, *map(str, torchrun), "-m", "dtcomm", "run", *argv])
    compression = Compression(for_ddp, for_fsdp)
    sys.argv = [arguments.script, *arguments.arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if arguments.module else os.path.dirname(os.path.abspath(arguments.script))
    run = functools.partial(runpy.run_module, alter_sys=True) if arguments.module else runpy.run_path
    with compression.watching():
        try:
            run(arguments.script, run_name="__main__")
        except SystemExit:
            compression.print_reports(arguments.json)
            raise
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
                trace = trace.tb_next  # the script's traceback begins with the script
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return 1
    compression.print_reports(arguments.json)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; what follows the script belongs to the script."""
    parser = argparse.ArgumentParser(
        prog="dtcomm run",
        description="Run a training script and compress the DDP and FSDP2 modules that it makes. It runs in each "
        "rank's process: torchrun --nproc-per-node 2 -m dtcomm run --codec int8 train.py, or starts torchrun.",
    )
    parser.add_argument("--nproc-per-node", type=count_argument(1), help="start so many ranks with torchrun")
    parser.add_argument("--codec", default="int8", help="what gradients are compressed with (int8)")
    parser.add_argument("--parameters", help="FSDP2: what parameters are compressed with (none)")
    parser.add_argument("--feedback", choices=FEEDBACK, help="error feedback (the integration's default)")
    parser.add_argument(
        "--exclude", action="append", help="pattern of what stays uncompressed; may be repeated (nothing)"
    )
    parser.add_argument(
        "--guard",
        choices=("off", *ACTIONS),
        help="what the guard does when compression does harm, or off: no guard (warn)",
    )
    parser.add_argument(
        "--verify",
        type=count_argument(0),
        help="pairs of steps that are measured, so that the report can say whether compression paid (0)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the reports of rank 0; - is standard output")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _options(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of `dtcomm.ddp.compress` and of `dtcomm.fsdp.compress`."""
    shared: dict[str, Any] = {}
    if arguments.feedback is not None:
        shared["feedback"] = FEEDBACK[arguments.feedback]
    if arguments.exclude:
        shared["exclude"] = arguments.exclude
    if arguments.guard is not None:
        shared["guard"] = None if arguments.guard == "off" else Guard(on_harm=arguments.guard)
    if arguments.verify is not None:
        shared["verify"] = arguments.verify
    return (
        {"codec": arguments.codec, **shared},
        {"gradients": arguments.codec, "parameters": arguments.parameters, **shared},
    )


def _check(for_ddp: Mapping[str, Any], for_fsdp: Mapping[str, Any]) -> None:
    """Raise the error about options that neither integration takes; a module may need those of one alone."""
    if for_fsdp["parameters"] is not None:
        parse_spec(for_fsdp["parameters"], PARAMETER_PREFIXES, "parameters")
    try:
        ddp.DDPState(**for_ddp)
    except ValueError as error:
        try:
            parse_spec(for_fsdp["gradients"], FEEDBACKS, "codec")
        except ValueError:
            raise error from None


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"dtcomm run: {text}", file=sys.stderr, flush=True)


class Compression:
    """Compresses DDP and FSDP2 modules before the first forward pass that they are in, and keeps their reports.

    Args:
        for_ddp: The options of `dtcomm.ddp.compress`.
        for_fsdp: The options of `dtcomm.fsdp.compress`.
    """

    def __init__(self, for_ddp: Mapping[str, Any], for_fsdp: Mapping[str, Any]) -> None:
        self._for_ddp, self._for_fsdp = for_ddp, for_fsdp
        self._waiting: list[weakref.ref[torch.nn.Module]] = []
        self._searched: weakref.WeakSet[torch.nn.Module] = (
            weakref.WeakSet()
        )  # they contain nothing that waits
        self._hook: Any = None
        self._finalizers: list[weakref.finalize[..., Any]] = []
        self._reports: list[Report] = []
        self._found = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Let DDP's constructor and `fully_shard` announce their modules, inside the context."""
        init, shard = DistributedDataParallel.__init__, fully_shard

        @functools.wraps(init)
        def init_and_wait(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
            init(model, *args, **options)
            self._wait_for(model)

        @functools.wraps(shard)
        def shard_and_wait(*args: Any, **options: Any) -> Any:
            sharded = shard(*args, **options)
            for module in sharded if isinstance(sharded, list | tuple) else [sharded]:
                self._wait_for(module)
            return sharded

        # Every module of torch that has the function under its name.
        modules = [
            module
            for module in list(sys.modules.values())
            if getattr(module, "__dict__", {}).get("fully_shard") is shard
        ]
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, DistributedDataParallel, "__init__", init)
            DistributedDataParallel.__init__ = init_and_wait  # type: ignore[method-assign,assignment]
            for module in modules:
                undo.callback(vars(module).update, fully_shard=shard)
                vars(module)["fully_shard"] = shard_and_wait
            undo.callback(self._stop_waiting)
            yield

    def _stop_waiting(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _wait_for(self, module: Any) -> None:
        self._found = True
        self._waiting.append(weakref.ref(module))
        self._searched.clear()
        if self._hook is None:
            # torch.compile's wrapper warns of the hook, which is gone before anything is compiled.
            warnings.filterwarnings(
                "ignore", message="Using `torch.compile.module.` when there are global hooks"
            )
            self._hook = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Compress what waits in a module that is called, or the sharded root that the module is a part of."""
        module = torch_compat.original_module(module)
        if module in self._searched:
            return
        waiting = [alive for reference in self._waiting if (alive := reference()) is not None]
        sharded = [each for each in waiting if isinstance(each, FSDPModule)]
        # The root was sharded last. A method of it may have called a part of it first.
        roots = [root for root in reversed(sharded) if any(part is module for part in root.modules())]
        model = roots[0] if roots else module
        inside = set(model.modules())
        found = [each for each in waiting if each in inside]
        if not found:
            self._searched.add(module)
            return
        self._waiting = [weakref.ref(each) for each in waiting if each not in inside]
        if not self._waiting:
            self._stop_waiting()
        for each in found:
            if isinstance(each, DistributedDataParallel):
                self._compress_ddp(each)
        if any(isinstance(each, FSDPModule) for each in found):
            self._compress_fsdp(model)

    def _compress_ddp(self, model: DistributedDataParallel) -> None:
        if torch_compat.ddp_hook_states(model):
            _say("a DistributedDataParallel has a communication hook of the script and is left alone")
        else:
            self._keep(model, ddp.compress(model, **self._for_ddp))

    def _compress_fsdp(self, model: torch.nn.Module) -> None:
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        gathers = [
            torch_compat.fsdp2_all_gather(group)
            for unit in units
            for group in torch_compat.fsdp2_parameter_groups(unit)
        ]
        if any(not type(gather).__module__.startswith("torch.") for gather in gathers):
            _say("an FSDP2 model has collectives that the script chose and is left alone")
            return
        state = fsdp.compress(model, **self._for_fsdp)
        if torch.is_grad_enabled():
            state.begin_forward()  # the hook of the model that does so begins with the next forward pass
        self._keep(model, state)

    def _keep(self, model: torch.nn.Module, state: Reporting) -> None:
        """Take the report at the end of the model's life or of the script; the process group may be gone by then."""
        first = state.report()

        def take_report() -> None:
            self._reports.append(replace(state.report(), rank=first.rank, world_size=first.world_size))

        finalizer = weakref.finalize(model, take_report)
        finalizer.atexit = False  # after an error of the script there is no report
        self._finalizers.append(finalizer)

    def print_reports(self, target: str | None) -> None:
        """Print what was compressed on rank 0, or that the script made nothing that can be; write it as JSON."""
        for finalizer in self._finalizers:
            finalizer()
        if os.environ.get("RANK", "0") != "0":
            return
        if not self._found:
            _say("nothing was compressed: the script made no DistributedDataParallel, nor called fully_shard")
        elif self._waiting:
            _say("a model of the script was not compressed: it was never called")
        if write_json({"reports": [report.to_dict() for report in self._reports]}, target, allow_nan=True):
            for report in self._reports:
                report.print()
