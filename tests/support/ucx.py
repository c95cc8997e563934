"""Whether UCX can be used here."""

from __future__ import annotations

import pytest

from dtcomm.runtime.bootstrap import between_hosts


def why_no_ucx() -> str:
    """Return why the engine cannot use UCX, or an empty string."""
    try:
        between_hosts.open_ucx()
    except RuntimeError as error:
        return f"{error}; on Debian and Ubuntu: apt-get install libucx-dev, and build again"
    return ""


WHY = why_no_ucx()
requires_ucx = pytest.mark.skipif(bool(WHY), reason=WHY or "-")
