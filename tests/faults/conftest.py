"""What the fault tests share: runs in processes of their own, which can be killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from victim import Keeper


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()
