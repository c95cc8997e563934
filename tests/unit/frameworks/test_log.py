"""What ``attach(..., log=True)`` logs through each framework, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtcomm.frameworks import Integration, attach
from dtcomm.profiling import Metric
from tests.unit.frameworks.test_attached import Compressor
from tests.unit.frameworks.test_lightning_hooks import Strategy

LOGGED = {"dtcomm/wire_bytes_total/gradients": 5.0}


class Measured(Compressor):
    def metrics(self) -> list[Metric]:
        infinite = Metric("dtcomm_relative_error", float("inf"), "")
        return [Metric("dtcomm_wire_bytes_total", 5.0, "", "counter", {"what": "gradients"}), infinite]


INTEGRATION: Integration[Any] = Integration(
    name="test",
    wrapper="Linear",
    accepts=lambda model: True,
    obstacle=lambda model: "",
    compress=lambda model: Measured(),
    unused=Measured,
)


class LightningStrategy(Strategy):
    def optimizer_step(self, name: str) -> str:
        return name


def test_an_accelerator_logs_the_metrics_once_the_model_is_compressed() -> None:
    logged: list[tuple[dict[str, float], int]] = []
    accelerator = SimpleNamespace(
        ddp_handler=None,
        num_processes=2,
        prepare=lambda model: model,
        prepare_model=lambda model: model,
        register_save_state_pre_hook=lambda hook: None,
        register_load_state_pre_hook=lambda hook: None,
        log=lambda values, step: logged.append((values, step)),
    )
    attach(accelerator, INTEGRATION, log=True)
    accelerator.log({"loss": 2.0}, step=1)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.log({"loss": 1.0}, step=2)
    assert logged == [({"loss": 2.0}, 1), ({"loss": 1.0, **LOGGED}, 2)]


@pytest.mark.parametrize("log", [False, True])
def test_lightning_logs_at_its_interval(log: bool) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((step, values)))
    strategy = LightningStrategy()
    state = SimpleNamespace(fn=SimpleNamespace(value="fit"))
    options: dict[str, Any] = {"world_size": 2, "log_every_n_steps": 3, "loggers": [logger], "state": state}
    trainer = SimpleNamespace(strategy=strategy, global_step=0, **options)
    attach(trainer, INTEGRATION, log=log)
    strategy.model = torch.nn.Linear(2, 2)  # type: ignore[assignment]
    strategy.setup(trainer)
    for trainer.global_step in range(7):
        assert strategy.optimizer_step("step") == "step"
    assert logged == ([(2, LOGGED), (5, LOGGED)] if log else [])
