"""A server that is stopped, a subscriber that takes nothing, and an object store of fsspec."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dtcomm.errors import PeerLost
from dtcomm.extensions.weights import Publisher, Subscriber
from dtcomm.extensions.weights.store import RemoteStore

ROOT = Path(__file__).parents[4]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_stopped_server_ends_at_the_timeout(tmp_path: Path) -> None:
    weights = {"x": torch.randn(1000)}
    Publisher(weights, tmp_path).publish(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "dtcomm",
        "weights",
        "serve",
        str(tmp_path),
        "--listen",
        f"127.0.0.1:{port}",
    ]
    server = subprocess.Popen(command, env=ENVIRONMENT)
    follower = Subscriber({"x": torch.zeros(1000)}, f"tcp://127.0.0.1:{port}", timeout_s=120)
    try:
        assert follower.update(at_least=1) == 1
        follower.close()
        late = Subscriber({"x": torch.zeros(1000)}, f"tcp://127.0.0.1:{port}", timeout_s=1)
        os.kill(server.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            late.update(at_least=2)
        # Not a measure of speed: without a limit it would wait for the process to go on, which it never does.
        assert time.monotonic() - begun < 30
        late.close()
    finally:
        server.kill()
        server.wait()


def test_a_subscriber_that_takes_nothing_does_not_hold_others() -> None:
    weights = {"x": torch.randn(4_000_000)}
    trainer = Publisher(weights, listen="127.0.0.1:0")
    trainer.publish(1)
    slow = RemoteStore(trainer.address, timeout_s=60)
    slow.index()
    (name,) = [name for name in trainer._store.list() if name.endswith(".full")]
    connection = slow._connections[0]
    assert connection is not None
    for number in range(28):  # more than the buffers of the kernel hold, and none of it is read
        connection.ask({"get": name, "offset": number << 19, "size": 1 << 19})
    engine = {"x": torch.zeros(4_000_000)}
    fast = Subscriber(engine, f"tcp://{trainer.address}", timeout_s=60)
    for version in (1, 2):
        assert fast.update(at_least=version) == version
        assert torch.equal(engine["x"], weights["x"])
        weights["x"] += 1
        trainer.publish(version + 1)
    for each in (fast, slow, trainer):
        each.close()


def test_an_engine_follows_through_an_object_store() -> None:
    pytest.importorskip("fsspec")
    weights = {"x": torch.randn(1000)}
    trainer = Publisher(weights, "memory://weights/run", anchor_every=2, keep=1)
    engine = {"x": torch.zeros(1000)}
    follower = Subscriber(engine, "memory://weights/run")
    for version in (1, 2, 3, 4):
        trainer.publish(version)
        assert follower.update(at_least=version) == version
        assert torch.equal(engine["x"], weights["x"])
        weights["x"] += 1
    late = {"x": torch.zeros(1000)}
    assert Subscriber(late, "memory://weights/run").update() == 4
    assert torch.equal(late["x"], engine["x"])
