"""The thread on which the stages of buckets run."""

from __future__ import annotations

import gc
import threading

import torch

from dtcomm.compress.stage_scheduler import Stages, StageScheduler
from dtcomm.streams import streams_of
from dtcomm.work import COMPLETED


def double(tensor: torch.Tensor, threads: list[threading.Thread]) -> Stages:
    threads.append(threading.current_thread())
    tensor *= 2
    yield COMPLETED
    tensor += 1


def test_the_thread_ends_with_the_scheduler() -> None:
    scheduler = StageScheduler(streams_of(torch.device("cpu")))
    tensor, threads = torch.ones(3), list[threading.Thread]()
    for _ in range(2):
        work = scheduler.submit(double(tensor, threads), [tensor], last=True)
        work.wait()
    assert tensor.eq(7).all()
    assert threads[0] is threads[1] is not threading.current_thread()
    del scheduler
    gc.collect()
    threads[0].join(timeout=20)
    assert not threads[0].is_alive()
