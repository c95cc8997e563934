"""The runtime over a torch.distributed group: operations that meet the end of the group."""

from __future__ import annotations

import threading

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.device.streams import HostStreams
from dtcomm.errors import DtcommError
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from dtcomm.runtime.torchdist.transport import Transport
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from tests.unit.algorithms.every_algorithm import build


class SilentTransport(Transport):
    """A transport that no operation of these tests reaches."""

    name = "silent"
    blocks_host = True

    def close(self) -> None:
        """Do nothing: no connection is open."""


class ClosingStreams(HostStreams):
    """Streams that close the runtime while an operation is on its way into its queue."""

    runtime: TorchDistRuntime

    def record(self) -> None:
        closing = threading.Thread(target=self.runtime.close)
        closing.start()
        closing.join()


def test_an_operation_that_meets_the_end_of_the_runtime_is_refused() -> None:
    streams = ClosingStreams()
    runtime = streams.runtime = TorchDistRuntime(SilentTransport(), streams, 0)
    spec = OpSpec("all_reduce", "sum", (TensorSpec(8, torch.float32, codec("none")),), "ring", 0)
    operation = runtime.prepare(spec, build("ring", "all_reduce", 2, 0))
    x = torch.ones(8)
    with pytest.raises(DtcommError, match="released"):
        operation.submit([Buffers(x, x, None)], [x], 1, None)
