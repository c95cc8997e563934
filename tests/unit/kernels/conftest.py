"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtcomm.kernels import available, use


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces a kernel for the whole test: the best native one, or the one that the test is parametrized with.

    test_bit_exact shows that all kernels give the same bytes for what encoders write, so a property of those is
    tested with one kernel. Payloads that no encoder writes, hand-computed bytes and types other than floats are
    tested with every kernel.
    """
    name = getattr(request, "param", available()[0])
    with use(name):
        yield name
