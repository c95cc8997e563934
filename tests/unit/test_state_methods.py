"""Every state has the same methods, with the same signatures."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtcomm import ddp
from dtcomm.backend import BackendReport
from dtcomm.compress import checkpoint
from dtcomm.compress.guard import Guard
from dtcomm.compress.policy import Policy
from dtcomm.compress.report import RankReport, Report
from dtcomm.compress.reporting import GroupTraffic, Reporting
from dtcomm.profiling.metrics import Metric

METHODS = (
    "report",
    "print_report",
    "log",
    "observe",
    "state_dict",
    "load_state_dict",
    "detach",
    "config",
)
#: One in each integration; a new one must be imported here to be found.
PACKAGES = ("context_parallel", "ddp", "fsdp", "local_sgd", "moe", "pipeline", "tp")
STATES = (
    "ContextParallelState",
    "DDPState",
    "FSDPState",
    "LocalSGD",
    "MoEState",
    "PipelineState",
    "ShardedOptimizer",
    "TPState",
)


def subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def find_states() -> dict[str, type[Reporting]]:
    for package in PACKAGES:
        importlib.import_module(f"dtcomm.{package}")
    return {
        kind.__name__: kind
        for kind in subclasses(Reporting)
        if kind.__module__.startswith("dtcomm.")
        and not kind.__module__.startswith("dtcomm.extensions.")
        and kind is not GroupTraffic
    }


def test_the_states_are_those_of_the_integrations() -> None:
    assert tuple(sorted(find_states())) == STATES


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("method", METHODS)
def test_every_state_has_every_method(name: str, method: str) -> None:
    own, common = getattr(find_states()[name], method), getattr(Reporting, method)
    assert str(inspect.signature(own)) == str(inspect.signature(common))
    assert inspect.getdoc(own)
    assert not getattr(own, "__isabstractmethod__", False)


def test_every_state_has_a_name_of_its_own() -> None:
    names = [kind.integration for kind in find_states().values() if kind.__name__ != "FSDPState"]
    assert all(names) and len(set(names)) == len(names)


class State(Reporting):
    integration = "test"

    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments

    def report(self) -> Report:
        report = Report(
            policy="int8", feedback=False, steps=3, messages=6, wire_bytes=1, plain_bytes=4, seconds=None,
            residual_bytes=8,
        )  # fmt: skip
        return report

    def detach(self) -> None:
        """Do nothing."""

    def metrics(self) -> list[Metric]:
        nan = Metric("dtcomm_nan", float("nan"), "not a number")
        return [*super().metrics(), nan, Metric("dtcomm_x", 2, "", labels={"what": "a b/c"})]


VALUES = {
    "dtcomm/messages_total": 6.0,
    "dtcomm/steps_total": 3.0,
    "dtcomm/residual_bytes": 8.0,
    "dtcomm/x/a_b_c": 2.0,
}


class Wandb:
    """A run of wandb 0.22."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.calls.append((data, step))


class Mlflow(Wandb):
    """The module mlflow 3; loggers of Lightning 2 have the first two arguments."""

    def log_metrics(
        self, metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None
    ) -> None:
        self.calls.append((metrics, step))


class TensorBoard:
    """A SummaryWriter of torch 2.13."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.steps: set[int | None] = set()

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        self.values[tag] = scalar_value
        self.steps.add(global_step)

    @property
    def calls(self) -> list[Any]:
        (step,) = self.steps
        return [(self.values, step)]


@pytest.mark.parametrize("make", [Wandb, Mlflow, TensorBoard])
@pytest.mark.parametrize("step", [None, 7])
def test_log_gives_every_kind_of_logger_the_same_values(make: Any, step: int | None) -> None:
    logger = make()
    State().log(logger, step)
    assert logger.calls == [(VALUES, step)]


def test_log_gives_a_function_a_dict() -> None:
    given: list[Any] = []
    State().log(given.append, 7)
    assert given == [VALUES]


@pytest.mark.parametrize("logger", [None, {}, logging.getLogger("x")])
def test_log_names_the_valid_kinds_of_loggers(logger: Any) -> None:
    with pytest.raises(
        TypeError, match=r"logger: got \w+; valid: .*wandb.*TensorBoard.*MLflow, Lightning.*function"
    ):
        State().log(logger)


def test_observe_says_once_that_nothing_watches_losses(caplog: pytest.LogCaptureFixture) -> None:
    state = State()
    for _ in range(3):
        state.observe(1.0)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "observe: nothing watches the loss, because there is no guard here"
    ]
    caplog.clear()
    ddp.DDPState("int8").observe(1.0)
    assert not caplog.records


def test_a_state_without_anything_to_save_refuses_that_of_another_integration() -> None:
    state = State()
    saved = state.state_dict()
    state.load_state_dict(saved)
    state.load_state_dict([saved, saved], strict=False)
    with pytest.raises(ValueError, match="state: integration: saved by DDP; valid: a state of test"):
        state.load_state_dict(ddp.DDPState("int8").state_dict())
    with pytest.raises(ValueError, match="state: integration: saved by test; valid: a state of DDP"):
        ddp.DDPState("int8").load_state_dict(saved)
    with pytest.raises(ValueError, match="the entry 'integration' is missing"):
        state.load_state_dict(checkpoint.seal({}))


def test_config_has_plain_values_and_names_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    state = State(
        codec=Policy.parse("ndim<2 -> none; * -> int4"),
        path=Path("plan.json"),
        exclude=("a", "b"),
        guard=Guard(cosine=0.6),
        outer=print,
        plan={"a": ("row", "int4", False), "b": object()},
    )
    config = state.config()
    assert json.loads(json.dumps(config)) == config
    assert config["codec"] == "ndim<2 -> none; * -> int4" and config["path"] == "plan.json"
    assert config["exclude"] == ["a", "b"] and config["plan"] == {"a": ["row", "int4", False]}
    assert config["guard"]["cosine"] == 0.6 and config["guard"]["on_loss"] == "uncompressed"
    (record,) = caplog.records
    assert record.message.endswith("config() leaves out outer, plan.b; give it again")


def test_a_guard_may_be_given_as_a_mapping() -> None:
    state = ddp.DDPState("int8", guard={"on_loss": "error"})  # type: ignore[arg-type]
    assert state.config()["guard"]["on_loss"] == "error"
    with pytest.raises(TypeError, match=r"guard: unknown option 'on_los' \(did you mean 'on_loss'\?\)"):
        ddp.DDPState("int8", guard={"on_los": "error"})  # type: ignore[arg-type]


def test_the_report_of_the_backend_has_the_methods_of_reports(capsys: pytest.CaptureFixture[str]) -> None:
    fallback = {"operation": "all_reduce", "backend": "gloo", "reason": "op PRODUCT", "count": 3}
    group = {
        "name": "0", "ranks": [0, 1], "runtime": "native", "reason": "one host", "operations": 4, "wire_bytes": 8,
        "fallbacks": [fallback],
    }  # fmt: skip
    for rank in range(2):
        report = BackendReport((group,), rank)
        assert isinstance(report, RankReport) and issubclass(Report, RankReport)
        assert json.loads(report.to_json()) == report.to_dict() == {"rank": rank, "groups": [group]}
        report.print()
        assert capsys.readouterr().out == ("" if rank else f"{report.summary()}\n")
        report.print(verbose=True, all_ranks=True)
        assert capsys.readouterr().out == f"{report}\n"
    assert (
        "PRODUCT" in str(report) and "PRODUCT" not in report.summary() and "4 operations" in report.summary()
    )
