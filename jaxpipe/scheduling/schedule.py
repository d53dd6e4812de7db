"""`Schedule`: who runs what, in which order. Plain frozen data.

A schedule says for each *device* (a position on the pipeline axis) in which order it runs its
*actions*, each one pass of one *stage* on one *microbatch*; the *placement* says which device
holds a stage, and a device's *chunks* are its stages in ascending order. Making a `Schedule`
checks only that every number is in range; `Schedule.check` proves that it can be run. How it is
written, read, checked and simulated is in the other files of this folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import KINDS, Action

if TYPE_CHECKING:
    from jaxpipe.scheduling.graph import Graph
    from jaxpipe.scheduling.simulate import Costs, Timeline


@dataclass(frozen=True, repr=False)
class Schedule:
    """An order of actions for each device.

    ``placement[s]`` is the device of stage s; ``orders[d]`` the actions of device d. ``name`` is
    for people and is no part of equality. Lists are taken for tuples and ``(stage, kind,
    microbatch)`` for an action.

    >>> s = Schedule.parse("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1")
    >>> s.placement, s.microbatches
    ((0, 1), 2)
    >>> s.check()
    >>> print(s)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

    Raises `ScheduleError` where a number is out of range or of the wrong type.
    """

    devices: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for what in ("devices", "stages", "microbatches"):
            number = _integer(getattr(self, what), what)
            if number < 1:
                raise ScheduleError(f"A schedule needs {what} >= 1, got {number}.")
            object.__setattr__(self, what, number)
        if not isinstance(self.name, str):
            raise ScheduleError(f"A schedule's name is a string, got {self.name!r}.")
        object.__setattr__(self, "placement", self._valid_placement())
        object.__setattr__(self, "orders", self._valid_orders())

    def _valid_placement(self) -> tuple[int, ...]:
        placement = tuple(
            _integer(device, f"placement[{stage}]")
            for stage, device in enumerate(_items(self.placement, "placement"))
        )
        if len(placement) != self.stages:
            raise ScheduleError(
                f"placement has {len(placement)} entries for {self.stages} stages; "
                "it needs one device for each stage."
            )
        for stage, device in enumerate(placement):
            if not 0 <= device < self.devices:
                raise ScheduleError(
                    f"placement[{stage}] puts stage {stage} on device {device}, "
                    f"but devices are 0..{self.devices - 1}."
                )
        return placement

    def _valid_orders(self) -> tuple[tuple[Action, ...], ...]:
        orders = _items(self.orders, "orders")
        if len(orders) != self.devices:
            raise ScheduleError(
                f"orders has {len(orders)} entries for {self.devices} devices; "
                "it needs one order for each device (an empty one for an idle device)."
            )
        return tuple(
            tuple(
                self._valid_action(action, device, position)
                for position, action in enumerate(_items(order, f"orders[{device}]"))
            )
            for device, order in enumerate(orders)
        )

    def _valid_action(self, action: object, device: int, position: int) -> Action:
        where = f"at position {position} of device {device}"
        if not isinstance(action, tuple) or len(action) != 3:
            raise ScheduleError(f"{action!r} {where} is not an action (stage, kind, microbatch).")
        stage, kind, microbatch = action
        if kind not in KINDS:
            raise ScheduleError(f"{action!r} {where}: its kind is {kind!r}, not one of F, B, I, W.")
        stage = _integer(stage, f"the stage of {action!r} {where}")
        microbatch = _integer(microbatch, f"the microbatch of {action!r} {where}")
        if not 0 <= stage < self.stages:
            raise ScheduleError(
                f"{action!r} {where}: its stage is {stage}, but stages are 0..{self.stages - 1}."
            )
        if not 0 <= microbatch < self.microbatches:
            raise ScheduleError(
                f"{action!r} {where}: its microbatch is {microbatch}, "
                f"but microbatches are 0..{self.microbatches - 1}."
            )
        return Action(stage, str(kind), microbatch)

    # Questions.

    def device_of(self, stage: int) -> int:
        """The device that holds ``stage``."""
        return self.placement[stage]

    @cached_property
    def _chunks(self) -> tuple[tuple[int, ...], ...]:
        return chunks_of(self.placement, self.devices)

    def chunks(self, device: int) -> tuple[int, ...]:
        """The stages of ``device``, ascending; entry c is the device's chunk c."""
        return self._chunks[device]

    @cached_property
    def _kinds(self) -> tuple[frozenset[str], ...]:
        kinds: list[set[str]] = [set() for _ in range(self.stages)]
        for action in self.actions():
            kinds[action.stage].add(action.kind)
        return tuple(frozenset(found) for found in kinds)

    def kind_of(self, stage: int) -> str:
        """How ``stage`` runs its backward: "B", "IW", "mixed" (some microbatches each), or "F".

        >>> Schedule.parse("0F0 0B0").kind_of(0)
        'B'
        """
        kinds = self._kinds[stage]
        whole, split = "B" in kinds, bool(kinds & {"I", "W"})
        return {(1, 0): "B", (0, 1): "IW", (1, 1): "mixed", (0, 0): "F"}[whole, split]

    @property
    def forward_only(self) -> bool:
        """Whether the schedule has no B, I or W."""
        return all(kinds <= {"F"} for kinds in self._kinds)

    def actions(self) -> Iterator[Action]:
        """Every action, device by device, in order."""
        for order in self.orders:
            yield from order

    # Derived schedules.

    def forward(self) -> Schedule:
        """The F actions alone, in the same order: what an evaluation runs.

        >>> print(Schedule.parse("0F0 0F1 0B0 0B1").forward())
        0F0 0F1
        """
        orders = tuple(tuple(a for a in order if a.kind == "F") for order in self.orders)
        return replace(self, orders=orders)

    # Forms.

    def __str__(self) -> str:
        from jaxpipe.scheduling.text import to_text

        return to_text(self)

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, devices={self.devices}, stages={self.stages}, "
            f"microbatches={self.microbatches})"
        )

    def __format__(self, spec: str) -> str:
        """``format(s)`` is the text form; ``format(s, "grid")`` draws it over time (F = I = W = 1).

        The grid of a schedule that cannot be run raises `ScheduleError`.

        >>> print(format(Schedule.parse("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1"), "grid"))
        device 0  F0 F1 .  .  B0--- .  B1---
        device 1  .  F0 B0--- F1 B1--- .  .
        """
        if spec in ("", "text"):
            return str(self)
        if spec == "grid":
            from jaxpipe.view.grid import render_grid

            return render_grid(self)
        raise ValueError(f'A schedule has the formats "text" and "grid", not {spec!r}.')

    @classmethod
    def parse(
        cls, text: str, *, placement: Sequence[int] | None = None, name: str = ""
    ) -> Schedule:
        """Read the text form: one line per device, an idle device is ``-``.

        The placement follows from the lines unless it is given. Raises `ScheduleError` with the
        line and column of what is not an action.

        >>> Schedule.parse("0F0 0B0\\n-").devices
        2
        """
        from jaxpipe.scheduling.text import from_text

        return from_text(text, placement=placement, name=name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to ``path``: ``.json`` (version 1), ``.txt`` (text), ``.csv`` (torch's form)."""
        from jaxpipe.scheduling.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read what `save` wrote, or another program did: ``.json``, ``.txt`` or ``.csv``.

        ``load(save(s)) == s``. Raises `ScheduleError` naming the file and the place in it.
        """
        from jaxpipe.scheduling.files import load

        return load(path)

    # Proof and cost.

    def check(
        self, graph: Graph | None = None, memory_limit: float | Sequence[float] | None = None
    ) -> None:
        """Raise `ScheduleError` unless this schedule can be run; see `scheduling.check.check`."""
        from jaxpipe.scheduling.check import check

        check(self, graph, memory_limit)

    def simulate(self, costs: Costs | None = None, graph: Graph | None = None) -> Timeline:
        """When each action starts and ends under ``costs``; see `scheduling.simulate`."""
        from jaxpipe.scheduling.simulate import simulate

        return simulate(self, costs, graph=graph)


def chunks_of(placement: Sequence[int], devices: int) -> tuple[tuple[int, ...], ...]:
    """Per device its stages, ascending.

    >>> chunks_of((0, 1, 1, 0), devices=2)
    ((0, 3), (1, 2))
    """
    chunks: list[list[int]] = [[] for _ in range(devices)]
    for stage, device in enumerate(placement):
        chunks[device].append(stage)
    return tuple(map(tuple, chunks))


def _integer(value: object, what: str) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ScheduleError(f"{what} must be an integer, got {value!r}.")
    return int(value.__index__())


def _items(value: object, what: str) -> tuple:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ScheduleError(f"{what} must be a tuple, got {value!r}.")
    return tuple(value)
