"""Schedules in files: JSON version 1, the line form, and the CSV of torch.distributed.pipelining.

The file's ending says which. JSON holds every schedule; the other two hold no placement and no
sizes, so `save` refuses a schedule that they could not give back. Errors of reading name the file
and the place: a path such as ``orders[1][3]``, a line and column, or a row and column.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.dataflow import DURATION, needs_of, unit_steps
from jaxpipe.scheduling.graph import Graph
from jaxpipe.scheduling.schedule import Schedule
from jaxpipe.scheduling.text import from_orders, from_text, to_action, to_text

FORMAT, VERSION = "jaxpipe.schedule", 1
_KEYS = ("format", "version", "name", "devices", "stages", "microbatches", "placement", "orders")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write ``schedule`` in the form that the ending of ``path`` names."""
    path = _path(path)
    if path.suffix == ".json":
        _write(path, to_json(schedule) + "\n")
        return
    if path.suffix == ".txt":
        text = to_text(schedule) + "\n"
    elif path.suffix == ".csv":
        text = to_csv(schedule)
    else:
        raise _unknown_ending(path)
    try:
        same = (from_text(text) if path.suffix == ".txt" else from_csv(text)) == schedule
    except ScheduleError:
        same = False
    if not same:
        raise ScheduleError(
            f"{path}: a {path.suffix} file holds only orders, and this schedule's placement or "
            "sizes do not follow from them. Save it as .json."
        )
    _write(path, text)


def load(path: str | os.PathLike[str]) -> Schedule:
    """Read the schedule in ``path``; a form without a name takes the file's."""
    path = _path(path)
    readers = {".json": from_json, ".txt": _from_named_text, ".csv": from_csv}
    if path.suffix not in readers:
        raise _unknown_ending(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: not UTF-8 text, byte {error.start}.") from None
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be read: {error.strerror}.") from error
    return readers[path.suffix](text, name=path.stem, source=f"{path}: ")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be written: {error.strerror}.") from error


def _path(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise ScheduleError(
            f"the path of a schedule's file is a str or a Path, not {path!r}."
        ) from None


def _from_named_text(text: str, *, name: str = "", source: str = "") -> Schedule:
    return from_text(text, name=name, source=source)


def _unknown_ending(path: Path) -> ScheduleError:
    return ScheduleError(
        f"{path}: schedules are kept in .json, .txt (text) and .csv (torch) files, "
        f"not {path.suffix or 'in a file without an ending'}."
    )


# JSON.


def to_json(schedule: Schedule) -> str:
    """The JSON form, version 1, on one line."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "name": schedule.name,
            "devices": schedule.devices,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "placement": schedule.placement,
            "orders": [list(map(str, order)) for order in schedule.orders],
        }
    )


def from_json(text: str, *, name: str = "", source: str = "") -> Schedule:
    """Read the JSON form. It names itself; ``name`` is not used."""
    try:
        data = json.loads(text, object_pairs_hook=_unrepeated)
    except json.JSONDecodeError as error:
        raise ScheduleError(
            f"{source}not JSON: line {error.lineno}, column {error.colno}: {error.msg}."
        ) from None
    except (ScheduleError, RecursionError, ValueError) as error:
        raise ScheduleError(f"{source}{error}") from None
    try:
        return _from_data(data)
    except ScheduleError as error:
        raise ScheduleError(f"{source}{error}") from None


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ScheduleError(f"the key {twice!r} is given twice.")
    return data


def _from_data(data: Any) -> Schedule:
    _is(data, dict, "the file")
    if data.get("format") != FORMAT:
        raise ScheduleError(f"format is {data.get('format')!r}, not {FORMAT!r}.")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise ScheduleError(
            f"version is {data.get('version')!r}; this jaxpipe reads version {VERSION}."
        )
    for key in _KEYS:
        if key not in data:
            raise ScheduleError(f"the key {key!r} is missing.")
    for key in data:
        if key not in _KEYS:
            raise ScheduleError(f"the key {key!r} is not part of version {VERSION}.")
    _is(data["name"], str, "name")
    for key in ("devices", "stages", "microbatches"):
        _is(data[key], int, key)
    for index, device in enumerate(_is(data["placement"], list, "placement")):
        _is(device, int, f"placement[{index}]")
    orders = []
    for device, order in enumerate(_is(data["orders"], list, "orders")):
        actions = []
        for position, item in enumerate(_is(order, list, f"orders[{device}]")):
            where = f"orders[{device}][{position}]"
            try:
                actions.append(to_action(_is(item, str, where)))
            except ScheduleError as error:
                message = str(error)
                if not message.startswith(where):
                    message = f"{where}: {message}."
                raise ScheduleError(message) from None
        orders.append(tuple(actions))
    return Schedule(
        data["devices"],
        data["stages"],
        data["microbatches"],
        tuple(data["placement"]),
        tuple(orders),
        data["name"],
    )


_JSON_TYPES = {dict: "an object", list: "an array", str: "a string", int: "an integer"}


def _is(value: Any, wanted: type, where: str) -> Any:
    if isinstance(value, wanted) and not isinstance(value, bool):
        return value
    raise ScheduleError(f"{where} must be {_JSON_TYPES[wanted]}, got {json.dumps(value)[:60]}.")


# CSV of torch.distributed.pipelining: one row per rank, one cell per time step.


def to_csv(schedule: Schedule) -> str:
    """One row per device and one column per action time step; empty cells are idle.

    A schedule that deadlocks is written without idle cells.
    """
    chain = Graph.chain(schedule.stages)
    steps = unit_steps(schedule, chain, needs_of(schedule, chain))
    aligned = all(
        ran == len(order) for ran, order in zip(steps.ran, schedule.orders, strict=True)
    ) and len(steps.start) == sum(map(len, schedule.orders))
    rows: list[list[str]] = []
    for order in schedule.orders:
        row: list[str] = []
        for action in order:
            if aligned:
                row += [""] * (steps.start[action] - len(row))
            row.append(str(action))
            if aligned:
                row += [""] * (DURATION[action.kind] - 1)
        rows.append(row)
    length = max(1, *map(len, rows))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([*row, *[""] * (length - len(row))] for row in rows)
    return out.getvalue()


def from_csv(text: str, *, name: str = "", source: str = "") -> Schedule:
    """Read torch's compute-only CSV; ``OVERLAP_F_B`` pairs are read as F, then B."""
    orders = []
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"{source}not CSV: {error}.") from None
    for number, row in enumerate(rows, 1):
        actions: list[Action] = []
        for column, cell in enumerate(row, 1):
            try:
                actions += _cell(cell.strip())
            except ScheduleError as error:
                raise ScheduleError(f"{source}row {number}, column {column}: {error}.") from None
        orders.append(tuple(actions))
    return from_orders(orders, placement=None, name=name, source=source, row="row")


def _cell(cell: str) -> list[Action]:
    if not cell:
        return []
    if overlap := _OVERLAP.fullmatch(cell):
        return [to_action(part.strip()) for part in overlap[1].split(";")]
    if _COMMUNICATION.fullmatch(cell):
        raise ScheduleError(
            f"{cell!r} is communication; only compute actions F, B, I, W are read (torch's "
            "compute-only form), transfers follow from them"
        )
    return [to_action(cell)]
