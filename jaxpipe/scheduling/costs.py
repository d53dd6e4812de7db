"""`Costs`: how long passes and transfers take, for simulation and for ordering by cost.

Times have no unit of their own: whatever they are given in, `Timeline` answers in. A *link* is an
ordered pair of devices (source, to); each link is one queue that moves values in the order in
which they are made. This file knows no orders and no dependences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import KINDS
from jaxpipe.scheduling.graph import Pass

Link = tuple[int, int]
Times = float | tuple[float, ...]
PerLink = float | tuple[tuple[Link, float], ...]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of passes (``F``, ``I``, ``W``, ``B``) and of transfers.

    A time given as **one number** is what a *device* spends on one microbatch where all stages are
    equal: a stage takes ``number * devices / stages`` of it (devices that hold none don't count),
    so that a chunk of v takes 1/v and schedules with different numbers of chunks can be compared.
    ``Costs()`` is F = I = W = 1 in this sense.
    A time given as a **sequence** has one entry for each *stage* and is taken as it is.

    F, I, W: time of a forward, a backward for inputs, a backward for weights.
    B: time of a full backward; I + W unless given. Passes that a graph lists as empty take no time.
    latency: time between the end of a transfer's sending and its arrival, for every link, or a
        mapping ``{(source, to): time}`` with an entry for every link that the schedule uses.
    bandwidth: bytes per unit of time, for every link or as a mapping; ``None`` is infinite.
    nbytes: size of each value that crosses from one stage to another, as one number or as a
        mapping ``{(stage, stage): bytes}`` in the direction of travel; ``None`` takes the graph's.
    overlap: whether transfers run beside computation. If not, a transfer starts when both devices
        have come to its place in their instruction lists, and both wait for its end.
    jitter: sigma of a lognormal factor of mean 1 on every action's time, drawn from ``seed``; the
        same action gets the same factor in whatever order a schedule runs it.

    >>> Costs().times(stages=4, devices=2)["B"]
    (1.0, 1.0, 1.0, 1.0)
    >>> Costs(F=(1, 3), I=2, W=0.5).times(stages=2, devices=2)["F"]
    (1.0, 3.0)

    Raises `ScheduleError` for negative, missing or non-finite numbers.
    """

    F: float | Iterable[float] = 1.0
    I: float | Iterable[float] = 1.0  # noqa: E741 (the field's letter, see DESIGN's terms)
    W: float | Iterable[float] = 1.0
    B: float | Iterable[float] | None = None
    latency: float | Mapping[Link, float] | PerLink = 0.0
    bandwidth: float | Mapping[Link, float] | PerLink | None = None
    nbytes: float | Mapping[tuple[int, int], float] | PerLink | None = None
    overlap: bool = True
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in KINDS:
            if kind == "B" and self.B is None:
                continue
            object.__setattr__(self, kind, _times(kind, getattr(self, kind)))
        object.__setattr__(self, "latency", _per_pair("latency", self.latency))
        for name in ("bandwidth", "nbytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _per_pair(name, getattr(self, name)))
        rates = () if self.bandwidth is None else _numbers(self.bandwidth)
        if any(rate == 0 for rate in rates):
            raise ScheduleError(
                "Costs(bandwidth=0): nothing would ever arrive. "
                "Give bytes per unit of time, or None for a link without limit."
            )
        object.__setattr__(self, "jitter", _number("jitter", self.jitter))

    def times(
        self, stages: int, devices: int, *, empty: frozenset[Pass] = frozenset()
    ) -> dict[str, tuple[float, ...]]:
        """The time of each kind of pass on each stage; passes in ``empty`` take none."""
        table: dict[str, tuple[float, ...]] = {}
        for kind in "FIW":
            each = self._per_stage(kind, stages, devices)
            table[kind] = tuple(0.0 if (s, kind) in empty else t for s, t in enumerate(each))
        if self.B is None:
            table["B"] = tuple(i + w for i, w in zip(table["I"], table["W"], strict=True))
        else:
            both = {s for s in range(stages) if (s, "I") in empty and (s, "W") in empty}
            each = self._per_stage("B", stages, devices)
            table["B"] = tuple(0.0 if s in both else t for s, t in enumerate(each))
        return table

    def _per_stage(self, kind: str, stages: int, devices: int) -> tuple[float, ...]:
        given: Any = getattr(self, kind)
        if isinstance(given, float):
            return (given * devices / stages,) * stages
        if len(given) != stages:
            raise ScheduleError(
                f"Costs({kind}=...) has {len(given)} entries but the schedule has {stages} stages. "
                f"Give one time for each stage, or one number for all."
            )
        return given

    def transfer(self, link: Link, edge: tuple[int, int], nbytes: float) -> tuple[float, float]:
        """(time that the link is busy, further time until arrival) of one value.

        ``link``: the devices it goes from and to; ``edge``: the stages; ``nbytes``: its size by
        the graph, used unless these costs give sizes themselves.

        >>> Costs(latency=2, bandwidth=10).transfer((0, 1), (0, 1), nbytes=5)
        (0.5, 2.0)
        """
        latency = _lookup("latency", self.latency, link)
        if self.bandwidth is None:
            return 0.0, latency
        if self.nbytes is not None:
            nbytes = _lookup("nbytes", self.nbytes, edge)
        return nbytes / _lookup("bandwidth", self.bandwidth, link), latency

    def factors(self, stages: int, microbatches: int) -> dict[str, np.ndarray] | None:
        """The jitter factor of every action: kind -> (stages, microbatches), or None without."""
        if not self.jitter:
            return None
        generator = np.random.default_rng(self.seed)
        shape = (len(KINDS), stages, microbatches)
        drawn = np.exp(self.jitter * generator.standard_normal(shape) - self.jitter**2 / 2)
        return dict(zip(KINDS, drawn, strict=True))

    def scaled(self, factor: float) -> Costs:
        """The same costs in another unit of time: every time is multiplied by ``factor``.

        >>> Costs(latency=1).scaled(1000).latency
        1000.0
        """
        factor = _number("factor", factor)

        def times(value: Any, by: float) -> Any:
            if value is None:
                return None
            if isinstance(value, float):
                return value * by
            if value and isinstance(value[0], tuple):
                return tuple((pair, number * by) for pair, number in value)
            return tuple(number * by for number in value)

        changed = {name: times(getattr(self, name), factor) for name in (*KINDS, "latency")}
        return replace(self, bandwidth=times(self.bandwidth, 1 / factor), **changed)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ScheduleError(f"Costs({name}=...) must be made of numbers, got {value!r}.") from None
    if not math.isfinite(number) or number < 0:
        raise ScheduleError(
            f"Costs({name}=...) contains {number}; times, sizes and rates are finite and not "
            f"negative."
        )
    return number


def _times(kind: str, value: Any) -> Times:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return tuple(_number(kind, each) for each in value)
    return _number(kind, value)


def _per_pair(name: str, value: Any) -> PerLink:
    items = value.items() if isinstance(value, Mapping) else value
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes)):
        return _number(name, items)
    pairs = []
    for item in items:
        try:
            (source, to), number = item
            pairs.append(((int(source), int(to)), _number(name, number)))
        except (TypeError, ValueError) as error:
            if isinstance(error, ScheduleError):
                raise
            raise ScheduleError(
                f"Costs({name}=...) must be one number or a mapping from pairs to numbers, such "
                f"as {{(0, 1): 2.0}}; got an entry {item!r}."
            ) from None
    return tuple(sorted(pairs))


def _numbers(value: Any) -> tuple[float, ...]:
    return (value,) if isinstance(value, float) else tuple(number for _, number in value)


def _lookup(name: str, value: Any, pair: tuple[int, int]) -> float:
    if isinstance(value, float):
        return value
    for known, number in value:
        if known == pair:
            return number
    what = "stages" if name == "nbytes" else "devices"
    raise ScheduleError(
        f"Costs({name}=...) has no entry for {what} {pair[0]} -> {pair[1]}, over which this "
        f"schedule sends. Add {pair}, or give one number for all."
    )


def costs_or_default(costs: object) -> Costs:
    """``costs``, or `Costs()` for None. Raises `ScheduleError` for anything else."""
    if costs is None:
        return Costs()
    if not isinstance(costs, Costs):
        raise ScheduleError(f"costs are jaxpipe.Costs(F=..., I=..., W=..., ...), not {costs!r}.")
    return costs
