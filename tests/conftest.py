"""The environment of all tests: what a user's machine was tuned to is not what they are about."""

import os

import pytest

from dtcomm.launch import fork_server

os.environ["DTCOMM_TUNE"] = "off"
# Tests share the cores: on a busy machine torch's threads wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Imported once for all ranks: each would take another two seconds over them.
fork_server.MODULES += [
    "dtcomm.collectives",
    "dtcomm.context_parallel",
    "dtcomm.ddp",
    "dtcomm.fsdp",
    "dtcomm.local_sgd",
    "dtcomm.moe",
    "dtcomm.pipeline",
    "dtcomm.profiling",
    "dtcomm.tp",
    "pytest",
    "torch._dynamo",  # by the first step of an optimizer
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # Where it is not installed, as on a machine that was not made for us, nothing is cut off; the setting stays known.
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds of a test, for pytest-timeout")
