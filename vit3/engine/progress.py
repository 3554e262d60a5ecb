"""A bar with rate and time left in a terminal; elsewhere nothing between the lines of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(title: str, batches: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Context that yields ``advance(images)``, to be called after each batch.

    Args:
        title: what is going on. batches: how many there will be. enabled: False in all but the main process.
    """
    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield lambda images: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    seen = 0
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=batches, rate="")

        def advance(images: int) -> None:
            nonlocal seen
            seen += images
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{seen / elapsed:,.0f} images/s" if elapsed else ""
            bar.update(task, advance=1, rate=rate)

        yield advance
