"""What torch.compile leaves as it is."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function")


def exclude_from_compilation(function: Function) -> Function:
    """Keep torch.compile from tracing a function and what it calls: a compiled caller has a graph break there.

    ``torch.compiler.disable`` does the same but imports the compiler, which takes seconds.

    Args:
        function: A function written in Python.

    Returns:
        The same function.
    """
    assert isinstance(function, FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # callers that are traced
    frames: Any = torch._C._dynamo.eval_frame  # callers that are not
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
