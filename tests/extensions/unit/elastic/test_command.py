"""The command ``dtcomm coordinator``: its arguments, and that it ends with an interrupt."""

from __future__ import annotations

import signal
import socket

import pytest

from dtcomm.cli.doctor.checks import variables
from dtcomm.extensions.elastic.coordinator import Coordinator, main


def test_it_serves_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []

    def interrupt(coordinator: Coordinator) -> None:
        served.append(coordinator)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Coordinator, "wait", interrupt)
    monkeypatch.setenv("DTCOMM_SECRET", "do not print me")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--listen", "127.0.0.1:0", "--ranks", "2", "--timeout", "5"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    text = capsys.readouterr().out
    assert f"127.0.0.1:{served[0].port}, with DTCOMM_SECRET" in text and "do not print" not in text
    assert not served[0]._thread.is_alive()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--listen", "nowhere"], "--listen: 'nowhere'; expected host:port"),
        (["--listen", "127.0.0.1:0", "--ranks", "0"], "ranks"),
        (["--listen", "127.0.0.1:0", "--min-members", "0"], "min_members"),
        (["--listen", "127.0.0.1:0", "--timeout", "0"], "timeout_s=0"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_the_doctor_does_not_print_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_SECRET", "do not print me")
    check = variables()
    assert "DTCOMM_SECRET=(set)" in check.summary
    assert "do not print" not in str(check)
