"""What the demo shows while it trains: a progress bar on a terminal, lines anywhere else.

This file knows rich and numbers; it knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Report = Callable[[int, float, float], None]


@contextmanager
def training_progress(console: Console, steps: int) -> Iterator[Report]:
    """Give ``report(step, loss, tokens_per_second)``, to be called after each step.

    On a terminal a bar moves; elsewhere ten lines are printed over the whole training.
    """
    if not console.is_terminal:
        yield _lines(console, steps)
        return
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("training", total=steps, loss=float("nan"), rate=0.0)
        yield lambda step, loss, rate: bar.update(task, completed=step + 1, loss=loss, rate=rate)


def _lines(console: Console, steps: int) -> Report:
    every = max(1, steps // 10)
    begun = time.perf_counter()

    def report(step: int, loss: float, rate: float) -> None:
        if (step + 1) % every == 0 or step + 1 == steps:
            seconds = time.perf_counter() - begun
            console.print(
                f"step {step + 1:4d}/{steps}  loss {loss:.3f}  {rate:,.0f} tokens/s  "
                f"{seconds:.0f} s",
                highlight=False,
            )

    return report


def results_table(rows: list[tuple[str, str, str]]) -> Table:
    """Rows of (what, pipelined, un-pipelined)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("pipelined", justify="right")
    table.add_column("un-pipelined", justify="right")
    for row in rows:
        table.add_row(*row)
    return table
