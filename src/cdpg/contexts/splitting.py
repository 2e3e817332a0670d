"""Groups of contexts that stay together when some are held out or used for validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from cdpg.contexts.contexts import Context
from cdpg.contexts.digests import prompt_key


def groups(contexts: Sequence[Context]) -> list[int]:
    """The number of each context's group, from 0 in the order of appearance.

    Contexts with the same ``group`` or the same prompt are in one group, transitively.
    """
    parents = list(range(len(contexts)))
    first: dict[tuple[str, str], int] = {}

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for index, context in enumerate(contexts):
        keys = [("prompt", prompt_key(context)), *([] if context.group is None else [("group", context.group)])]
        for key in keys:
            one, other = sorted((root(first.setdefault(key, index)), root(index)))
            parents[other] = one
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(index), len(numbers)) for index in range(len(contexts))]


def whole_groups(numbers: Sequence[int], order: Iterable[int], count: int) -> set[int]:
    """Groups with about ``count`` members in all: in the given order, those that still fit.

    If they have fewer than half of ``count`` members, the smallest other group is added, unless it is the only one.
    """
    sizes, room = Counter(numbers), count
    chosen: set[int] = set()
    others: list[int] = []
    for number in order:
        if sizes[number] <= room:
            chosen.add(number)
            room -= sizes[number]
        else:
            others.append(number)
    if 2 * room > count and len(others) > 1:
        chosen.add(min(others, key=lambda number: sizes[number]))
    return chosen


def split(
    contexts: Sequence[Context], count: int, order: Callable[[int], Iterable[int]]
) -> tuple[list[int], list[int]]:
    """Indices of the contexts that stay, and of about ``count`` others; no group is on both sides.

    ``order`` is given the number of groups and says in which order they are chosen. If all contexts are of one group,
    all of them stay.
    """
    numbers = groups(contexts)
    chosen = whole_groups(numbers, order(max(numbers, default=-1) + 1), count)
    staying = [index for index, number in enumerate(numbers) if number not in chosen]
    return staying, [index for index, number in enumerate(numbers) if number in chosen]
