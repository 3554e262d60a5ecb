"""An even sample of many files, looked at by a few threads, and lists of names in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_SHOWN = 12  # names in a sentence
Item, Result = TypeVar("Item"), TypeVar("Result")


def look_at(items: Sequence[Item], look: Callable[[Item], Result | None], sample: int) -> tuple[list[Result], int]:
    """Look at all items, or at an even sample where there are more.

    Args:
        look: called in several threads. sample: how many at most.

    Returns:
        Results that are not None, in the order of the items, and how many were looked at.
    """
    count = len(items)
    chosen = sorted({i * count // sample for i in range(sample)}) if count > sample else range(count)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: look(items[i]), chosen))
    return [result for result in results if result is not None], len(results)


def listed(names: Iterable[object]) -> str:
    """Names with commas, the first ones of many."""
    names = [str(name) for name in names]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
