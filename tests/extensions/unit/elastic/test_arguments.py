"""`ElasticLocalSGD` checks its arguments before others hear of it, and leaves no process group behind."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from dtcomm.extensions.elastic import ElasticLocalSGD


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group": None}, "group: not possible with ElasticLocalSGD"),
        ({"feedback": "ef21"}, "feedback: 'ef21'; valid with ElasticLocalSGD: True, False"),
        ({"timeout_s": 0}, "timeout_s=0: expected seconds above 0"),
        ({"every": 0}, "every"),
        ({"delay": 16}, "delay=16: expected less than every=16"),
        ({"coordinator": "somewhere"}, "coordinator: 'somewhere'; expected host:port"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ElasticLocalSGD(nn.Linear(4, 4), **{"coordinator": "127.0.0.1:1", **options})
    assert not dist.is_initialized()


def test_a_coordinator_that_does_not_answer_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        ElasticLocalSGD(nn.Linear(4, 4), f"127.0.0.1:{port}")
    assert not dist.is_initialized()


def test_a_group_that_exists_is_not_taken_over() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="is initialised already"):
            ElasticLocalSGD(nn.Linear(4, 4), "127.0.0.1:1")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
