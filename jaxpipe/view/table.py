"""The stage table: what each stage is made of and what it costs, aligned for people.

`stage_table` takes rows (mappings or objects with the same attributes) and gives a `StageTable`:
``str`` of it is plain text, ``rich`` prints it with lines and colours. It knows columns and units,
not stage graphs: whoever has a stage graph makes the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpipe.errors import PipelineError
from jaxpipe.view.units import flops, nbytes

if TYPE_CHECKING:
    from rich.table import Table


def _plain(value: Any) -> str:
    return str(value)


def _numbers(value: Any) -> str:
    """A run of numbers, joined where they follow one another: ``0-2, 5``."""
    if isinstance(value, (int, str)):
        return str(value)
    runs: list[list[int]] = []
    for number in value:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _where(value: Any) -> str:
    """Source lines with the last folder of their path only: ``demo/model.py:31-59``."""
    return re.sub(r"[^\s,:]*/(?=[^\s,:/]+/[^\s,:/]+)", "", str(value))


def _edges(value: Any) -> str:
    """What a stage sends: ``{2: 4096}`` is ``-> 2: 4.1 kB``."""
    if isinstance(value, Mapping):
        return ", ".join(f"-> {stage}: {nbytes(size)}" for stage, size in value.items())
    return str(value)


class Column(NamedTuple):
    """A column: the row's key, its heading, how a value is written, and on which side it stands.

    ``total``: whether the last line adds the column up.
    """

    key: str
    heading: str
    write: Callable[[Any], str]
    right: bool = False
    total: bool = False


COLUMNS = (
    Column("stage", "stage", _plain, right=True),
    Column("device", "device", _plain, right=True),
    Column("segments", "segments", _numbers),
    Column("name", "names", _plain),
    Column("lines", "source lines", _where),
    Column("param_nbytes", "params", nbytes, right=True, total=True),
    Column("flops", "FLOPs", flops, right=True, total=True),
    Column("residual_nbytes", "residuals", nbytes, right=True, total=True),
    Column("vjp_residual_nbytes", "vjp residuals", nbytes, right=True, total=True),
    Column("edges", "edges out", _edges),
)


@dataclass(frozen=True)
class StageTable:
    """Headings and written cells; the last of ``lines`` holds totals where ``total`` is set."""

    columns: tuple[Column, ...]
    lines: tuple[tuple[str, ...], ...]
    total: bool = False

    def __str__(self) -> str:
        rows = [tuple(column.heading for column in self.columns), *self.lines]
        widths = [max(len(row[n]) for row in rows) for n in range(len(self.columns))]
        rule = "  ".join("-" * width for width in widths)
        text = [
            "  ".join(
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, width, column in zip(row, widths, self.columns, strict=True)
            ).rstrip()
            for row in rows
        ]
        text.insert(1, rule)
        if self.total:
            text.insert(len(text) - 1, rule)
        return "\n".join(text)

    def rich(self, title: str | None = None) -> Table:
        """The same as a rich table."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
        for column in self.columns:
            table.add_column(
                column.heading, justify="right" if column.right else "left", overflow="fold"
            )
        for n, line in enumerate(self.lines):
            last = self.total and n == len(self.lines) - 1
            if last:
                table.add_section()
            table.add_row(*map(Text, line), style="bold" if last else None)
        return table

    def __rich__(self) -> Table:
        return self.rich()


def stage_table(rows: Iterable[Any]) -> StageTable:
    """Make a table of rows, one for each stage.

    A row is a mapping or an object with some of: ``stage``, ``device``, ``segments`` (numbers),
    ``name`` (of the boundaries that open them), ``lines`` (where the stage is in the source),
    ``param_nbytes``, ``flops``, ``residual_nbytes``, ``vjp_residual_nbytes`` (of one microbatch),
    ``edges`` (a mapping stage -> bytes, or text).
    Columns that no row has are left out; with more than one row the last line has the sums.

    >>> first = {"stage": 0, "device": 0, "segments": (0, 1), "param_nbytes": 4_200_000}
    >>> last = {"stage": 1, "device": 1, "segments": (2,), "param_nbytes": 512}
    >>> print(stage_table([first | {"edges": {1: 65536}}, last]))
    stage  device  segments  params  edges out
    -----  ------  --------  ------  -------------
        0       0  0-1       4.2 MB  -> 1: 65.5 kB
        1       1  2          512 B
    -----  ------  --------  ------  -------------
    total                    4.2 MB

    Raises `PipelineError` for a row with unknown keys.
    """
    values = [_values(row) for row in rows]
    columns = tuple(c for c in COLUMNS if any(row.get(c.key) is not None for row in values))
    lines = [
        tuple("" if row.get(c.key) is None else c.write(row[c.key]) for c in columns)
        for row in values
    ]
    total = len(values) > 1 and any(column.total for column in columns)
    if total:
        sums = [
            c.write(sum(row[c.key] for row in values if row.get(c.key) is not None))
            if c.total
            else ""
            for c in columns
        ]
        sums[0] = sums[0] or "total"
        lines.append(tuple(sums))
    return StageTable(columns, tuple(lines), total)


def _values(row: Any) -> dict[str, Any]:
    known = [column.key for column in COLUMNS]
    if not isinstance(row, Mapping):
        return {key: getattr(row, key, None) for key in known}
    unknown = [key for key in row if key not in known]
    if unknown:
        raise PipelineError(
            f"A row of the stage table has {unknown[0]!r}, but its columns are {', '.join(known)}."
        )
    return dict(row)
