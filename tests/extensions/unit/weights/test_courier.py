"""Publishers and subscribers in one process: stores, servers, relays, retention, damage, lost connections."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtcomm.cli.main import main
from dtcomm.errors import CollectiveTimeout, PayloadCorrupt, PeerLost
from dtcomm.extensions.weights import Publisher, Server, Subscriber
from dtcomm.extensions.weights.files import INDEX, Index, Release, Store, route
from dtcomm.extensions.weights.store import RemoteStore

State = dict[str, Tensor]


def state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(300, 200, generator=generator).bfloat16() for i in range(4)}


def train(weights: State) -> None:
    for tensor in weights.values():
        tensor.view(-1).view(torch.int16)[::31] += 1


def zeros(weights: State) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in other)


@contextmanager
def closing(*things: Publisher | Subscriber | Server) -> Iterator[None]:
    try:
        yield
    finally:
        for each in things:
            each.close()


def followed(folder: Path) -> tuple[State, Publisher, State, Subscriber]:
    """Return weights and their publisher, and an engine that has the first version, with its subscriber."""
    weights = state()
    trainer = Publisher(weights, folder)
    trainer.publish()
    engine = zeros(weights)
    follower = Subscriber(engine, folder)
    follower.update()
    return weights, trainer, engine, follower


def test_a_route_is_the_one_with_the_fewest_bytes() -> None:
    def release(version: int, base: int | None, size: int) -> Release:
        return Release(version, base, ((f"{version}.{base}", size),))

    whole, late = release(3, None, 100), release(5, None, 100)
    deltas = [release(n, n - 1, 10) for n in (4, 5, 6)]
    releases = (whole, *deltas, late)
    assert route(releases, 4) == deltas[1:]
    assert route(releases, None) == [late, deltas[2]]
    assert route(releases, 2) == [late, deltas[2]]
    assert route(releases, 6) == []
    assert route((), None) == []


def test_an_engine_follows_through_a_folder(tmp_path: Path) -> None:
    weights = state()
    trainer = Publisher(weights, tmp_path, anchor_every=3, keep=1, part_bytes=200_000, model="m")
    engine = zeros(weights)
    pauses: list[State] = []

    @contextmanager
    def pause() -> Iterator[None]:
        pauses.append({name: tensor.clone() for name, tensor in engine.items()})
        yield

    follower = Subscriber(engine, str(tmp_path), pause=pause, model="m")
    assert follower.update() is None
    for version in range(5):
        assert trainer.publish() == version == follower.update(at_least=version)
        assert equal(engine, weights)
        train(weights)
    assert len(pauses) == 5
    report = follower.report()
    assert report["version"] == 4 and report["bytes"] == trainer.report()["bytes"] < 40_000
    assert 0.03 < report["share_changed"] < 0.035 and 0 < report["bits_per_changed"] < 20
    seen: dict[str, float] = {}
    trainer.log(seen.update)
    assert seen["weights/version"] == 4
    # Only what a late receiver needs is kept: version 3 whole, and what follows it.
    assert {name.split(".")[0] for name in (path.name for path in tmp_path.iterdir())} == {"index", "3", "4"}
    late = zeros(weights)
    assert Subscriber(late, tmp_path).update() == 4
    assert equal(late, engine)
    with pytest.raises(CollectiveTimeout, match="version 9"):
        follower.update(at_least=9, timeout_s=0.1)


def test_equal_weights_are_not_received_again(tmp_path: Path) -> None:
    weights = state()
    trainer = Publisher(weights, tmp_path)
    trainer.publish()
    train(weights)
    trainer.publish()
    follower = Subscriber({name: tensor.clone() for name, tensor in weights.items()}, tmp_path)
    assert follower.update() == 1 and follower.report()["bytes"] == 0


def test_a_publisher_that_begins_again_publishes_whole_weights(tmp_path: Path) -> None:
    weights = state()
    engine = zeros(weights)
    follower = Subscriber(engine, tmp_path)
    first = Publisher(weights, tmp_path)
    first.publish()
    follower.update()
    (tmp_path / "1.0.0.0badf00d.delta").write_bytes(b"what a killed publisher left")
    train(weights)
    assert Publisher(weights, tmp_path).publish() == 1
    assert follower.update() == 1 and equal(engine, weights)


def test_a_publisher_that_fails_publishes_whole_weights_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, trainer, engine, follower = followed(tmp_path)
    train(weights)
    with monkeypatch.context() as patch:

        def full(name: str, data: bytes) -> None:
            raise OSError("no space is left")

        patch.setattr(trainer._store, "put", full)
        with pytest.raises(OSError, match="no space"):
            trainer.publish()
    assert follower.update() == 0
    train(weights)
    assert trainer.publish() == 1 == follower.update()
    assert equal(engine, weights)


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    weights, trainer, engine, follower = followed(tmp_path)
    before = {name: tensor.clone() for name, tensor in engine.items()}
    train(weights)
    trainer.publish()
    (file,) = tmp_path.glob("1.*.delta")
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    with pytest.raises(PayloadCorrupt, match="version 1"):
        follower.update()
    assert equal(engine, before) and follower.version == 0
    (tmp_path / "index.json").write_text('{"releases": [[1, null, [["../secret", 10]]]]}')
    with pytest.raises(PayloadCorrupt, match="index"):
        follower.update()


def test_engines_follow_over_tcp_and_through_a_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_SECRET", "s")
    weights = state()
    trainer = Publisher(weights, listen="127.0.0.1:0", part_bytes=200_000)
    source = f"tcp://{trainer.address}"
    relay = Server(tmp_path, "127.0.0.1:0", upstream=source)
    engines = [zeros(weights), zeros(weights)]
    followers = [
        Subscriber(engines[0], source, connections=3),
        Subscriber(engines[1], f"tcp://{relay.address}", buffers=2),
    ]
    with closing(relay, *followers, trainer):
        for version in range(3):
            trainer.publish()
            for engine, follower in zip(engines, followers):
                assert follower.update(at_least=version) == version
                assert equal(engine, weights)
            train(weights)
        monkeypatch.setenv("DTCOMM_SECRET", "other")
        stranger = Subscriber(zeros(weights), source, timeout_s=5)
        with pytest.raises(PeerLost):
            stranger.update()
        stranger.close()


class Watched(Store):
    """A store in memory that calls a function before each file is written."""

    def __init__(self, before: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._before = before

    def put(self, name: str, data: bytes) -> None:
        self._before(name, data)
        super().put(name, data)


def test_parts_are_received_before_a_version_is_complete_and_not_applied() -> None:
    arrived, complete = threading.Event(), threading.Event()

    def before(name: str, data: bytes) -> None:
        if name.startswith("1.0.2"):
            assert arrived.wait(60), "no part came through the relay while the version was published"
            assert equal(engine, old)
        if name == INDEX and Index.read(data).newest == 1:
            complete.set()

    def progress(size: int) -> None:
        assert not complete.is_set() or arrived.is_set()
        arrived.set()

    weights = {f"x{i}": torch.randn(1 << 19) for i in range(3)}  # each one is a part
    old, engine = ({name: tensor.clone() for name, tensor in weights.items()} for _ in range(2))
    trainer = Publisher(weights, Watched(before), listen="127.0.0.1:0")
    trainer.publish(0)
    relay = Server(Store(), "127.0.0.1:0", upstream=f"tcp://{trainer.address}")
    follower = Subscriber(engine, f"tcp://{relay.address}")
    with closing(follower, relay, trainer):
        follower.update(at_least=0)
        follower._source.on_progress = progress
        thread = threading.Thread(target=follower.update, kwargs={"at_least": 1})
        thread.start()
        for tensor in weights.values():
            tensor += 1
        trainer.publish()
        thread.join(60)
        assert equal(engine, weights)


@pytest.mark.parametrize("tcp", [False, True])
def test_what_a_failed_publisher_left_is_not_used(tcp: bool) -> None:
    def before(name: str, data: bytes) -> None:
        if name.startswith("1.0.2") and name.endswith(".delta"):
            raise OSError("no space is left")

    weights = {f"x{i}": torch.randn(1 << 19) for i in range(3)}
    store = Watched(before)
    trainer = Publisher(weights, store, listen="127.0.0.1:0")
    trainer.publish(0)
    engine = zeros(weights)
    follower = Subscriber(engine, f"tcp://{trainer.address}" if tcp else store)
    with closing(follower, trainer):
        follower.update()
        old = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values():
            tensor += 1
        with pytest.raises(OSError, match="no space"):
            trainer.publish()
        with pytest.raises(CollectiveTimeout):
            follower.update(at_least=1, timeout_s=0.5)
        assert equal(engine, old) and follower.version == 0
        for tensor in weights.values():
            tensor += 1
        thread = threading.Thread(target=follower.update, kwargs={"at_least": 1})
        thread.start()
        assert trainer.publish() == 1
        thread.join(60)
        assert equal(engine, weights)


def test_files_outside_a_store_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "store").mkdir()
    server = Server(tmp_path / "store", "127.0.0.1:0")
    remote = RemoteStore(server.address, timeout_s=5)
    with closing(server):
        for name in ("../secret", ".secret", "", "a/b"):
            with pytest.raises(Exception, match="no valid request"):
                remote.get(name, 0, 1)
        with pytest.raises(Exception, match="no file"):
            remote.get("absent", 0, 1)
        remote.close()


def test_a_version_is_received_over_connections_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"x": torch.randn(3_000_000)}
    trainer = Publisher(weights, listen="127.0.0.1:0")
    trainer.publish()
    follower = Subscriber(zeros(weights), f"tcp://{trainer.address}", timeout_s=10)
    source = follower._source
    ended = threading.Event()

    def end(size: int) -> None:
        if not ended.is_set():
            ended.set()
            for connection in source._connections[1:]:
                if connection is not None:
                    connection._socket.shutdown(2)

    source.on_progress = end
    with closing(follower, trainer):
        assert follower.update() == 0 and ended.is_set()
        assert torch.equal(follower.weights.slices["x"].tensor, weights["x"])


def test_a_server_that_is_gone_ends_at_the_timeout() -> None:
    trainer = Publisher(state(), listen="127.0.0.1:0")
    trainer.publish()
    address = trainer.address
    trainer.close()
    follower = Subscriber(zeros(state()), f"tcp://{address}", timeout_s=0.5)
    with pytest.raises(PeerLost, match=address.rpartition(":")[2]):
        follower.update()


def test_masters_are_published_in_the_dtype_of_the_engine(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 20)
    trainer = Publisher(model, tmp_path, dtype=torch.bfloat16)
    engine = torch.nn.Linear(30, 20).bfloat16()
    trainer.publish()
    assert Subscriber(engine, tmp_path).update() == 0
    assert torch.equal(engine.weight, model.weight.bfloat16())


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="store"):
        Publisher(state())
    with pytest.raises(ValueError, match="keep"):
        Publisher(state(), tmp_path, keep=0)
    with pytest.raises(ValueError, match="buffers"):
        Subscriber(state(), tmp_path, buffers=3)
    with pytest.raises(ValueError, match="version"):
        trainer = Publisher(state(), tmp_path)
        trainer.publish(5)
        trainer.publish(5)
    assert [each.version for each in Index.read((tmp_path / "index.json").read_bytes()).releases] == [5]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_the_command_changes_files(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    if suffix == "safetensors":
        files = pytest.importorskip("safetensors.torch")
        save, load = files.save_file, files.load_file
    else:
        save, load = torch.save, torch.load
    old, new = state(), state()
    train(new)
    paths = [str(tmp_path / f"{name}.{suffix}") for name in ("old", "new")]
    patch, out = str(tmp_path / "patch"), str(tmp_path / f"out.{suffix}")
    save(old, paths[0])
    save(new, paths[1])
    assert main(["weights", "diff", *paths, patch, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["version"] == 1 and 0 < figures["changed"] < figures["elements"]
    assert main(["weights", "inspect", patch]) == 0
    assert "layer3" in capsys.readouterr().out
    assert main(["weights", "apply", paths[0], patch, "--out", out]) == 0
    assert equal(load(out), new) and equal(load(paths[0]), old)
    assert main(["weights", "apply", paths[0], patch]) == 0
    assert main(["weights", "apply", paths[0], patch]) == 1
    assert "new one" in capsys.readouterr().err
    assert equal(load(paths[0]), new)
    Publisher(old, tmp_path / "store").publish()
    assert main(["weights", "inspect", str(tmp_path / "store")]) == 0
    assert "version 0" in capsys.readouterr().out
