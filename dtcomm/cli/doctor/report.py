"""Result of one check of ``dtcomm doctor``."""

from __future__ import annotations

import dataclasses
from typing import Any

OK, NOTE, FAIL = "ok", "note", "FAIL"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Result of a check: a ``summary`` to print and ``details`` (JSON values) for programs."""

    name: str
    summary: str
    status: str = OK
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "status": self.status, "summary": self.summary, **self.details}
