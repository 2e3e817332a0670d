"""Which cases of a test the ordinary round has; the long round has all (``make test-faults``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def ordinary(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases for ``parametrize``: those that are not chosen are left to the long round."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]
