"""`ScheduleFunction`: what all ways of writing a schedule for any size have in common.

It resolves options between itself and its placement, has the orders built, reads each device's
order with its mistakes told where they stand, and returns a checked `Schedule`. How orders are
built is the caller's: a generator (`dsl`), or list scheduling (`greedy`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from jaxpipe._integers import integer
from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import placements
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.kinds import Kind, LocalAction
from jaxpipe.scheduling.schedule import Schedule, chunks_of

REQUIRED = inspect.Parameter.empty
Order = Iterable[LocalAction | Action]


class ScheduleFunction:
    """A schedule for any number of devices and microbatches: call it to get a `Schedule`.

    ``build(devices, microbatches, placement, **options)`` gives one order per device;
    ``options`` maps the option names that ``build`` takes to their defaults (`REQUIRED` where
    there is none). The placement's own options are accepted too.
    """

    def __init__(
        self,
        build: Callable[..., Iterable[Order]],
        *,
        name: str,
        doc: str | None = None,
        placement: placements.Placement = placements.linear,
        stages: int | Callable[..., int] | None = None,
        options: Mapping[str, Any] | None = None,
        any_option: bool = False,
        wrapped: Callable[..., Any] | None = None,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc
        self.placement = placement
        self.options = dict(options or {})
        self._build = build
        self._stages = stages
        self._any_option = any_option
        if wrapped is not None:
            self.__wrapped__ = wrapped
            self.__module__ = wrapped.__module__
            self.__qualname__ = wrapped.__qualname__

    def __repr__(self) -> str:
        return f"<schedule function {self.__name__}>"

    def __call__(self, devices: int, microbatches: int, **options: Any) -> Schedule:
        """The schedule for these sizes, checked. Raises `ScheduleError`."""
        name = self.__name__ + _written(options)
        devices = _size(name, "devices", devices)
        microbatches = _size(name, "microbatches", microbatches)
        for_build, placement = self._resolve(name, devices, options)
        chunks = chunks_of(placement, devices)
        most = 3 * len(placement) * microbatches  # F, I and W of everything: more is a mistake
        orders = tuple(
            _order(name, device, order, chunks[device], microbatches, most)
            for device, order in enumerate(
                self._build(devices, microbatches, placement, **for_build)
            )
        )
        result = Schedule(devices, len(placement), microbatches, placement, orders, name)
        result.check()
        return result

    def stages(self, devices: int, **options: Any) -> int:
        """The number of stages that this schedule wants on ``devices`` devices."""
        name = self.__name__ + _written(options)
        devices = _size(name, "devices", devices)
        return len(self._resolve(name, devices, options)[1])

    def _resolve(
        self, name: str, devices: int, options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Options for ``build`` (defaults filled in), and the placement as a tuple."""
        of_placement, placement_takes_any = (
            parameters_of(self.placement, skip=1) if callable(self.placement) else ({}, False)
        )
        known = {**of_placement, **self.options}
        for option in options:
            if option not in known and not (self._any_option or placement_takes_any):
                raise ScheduleError(_unknown_option(name, self.__name__, option, known))
        merged = {**known, **options}
        missing = [option for option, value in merged.items() if value is REQUIRED]
        if missing:
            raise ScheduleError(f"Schedule {name} needs a value for the option {missing[0]}.")
        for_build = {
            option: value
            for option, value in merged.items()
            if option in self.options or self._any_option
        }
        for_placement = {
            option: value
            for option, value in merged.items()
            if option in of_placement or placement_takes_any
        }
        placement = _place(name, self.placement, devices, for_placement)
        self._same_stages(name, devices, merged, placement)
        return for_build, placement

    def _same_stages(
        self, name: str, devices: int, options: Mapping[str, Any], placement: tuple[int, ...]
    ) -> None:
        if self._stages is None:
            return
        wanted = self._stages
        if callable(wanted):
            accepted, takes_any = parameters_of(wanted, skip=1)
            given = {k: v for k, v in options.items() if takes_any or k in accepted}
            try:
                wanted = wanted(devices, **given)
            except Exception as error:
                raise ScheduleError(
                    f"Schedule {name}: its number of stages raised {type(error).__name__}: "
                    f"{error} (devices={devices})."
                ) from error
        if wanted != len(placement):
            raise ScheduleError(
                f"Schedule {name} says that it has {wanted} stages on {devices} devices, but its "
                f"placement places {len(placement)}: {placement}."
            )


def _order(
    name: str, device: int, order: object, stages: tuple[int, ...], microbatches: int, most: int
) -> tuple[Action, ...]:
    """One device's yield as actions, each looked at where it stands."""
    if isinstance(order, str) or not isinstance(order, Iterable):
        raise ScheduleError(
            f"Schedule {name}: device {device} got {order!r} for its order; "
            "yield actions such as F(0), or return a list of them."
        )
    actions: list[Action] = []
    items = iter(order)
    while True:
        where = f"Schedule {name}, device {device}, position {len(actions)}"
        try:
            item = next(items)
        except StopIteration:
            return tuple(actions)
        except ScheduleError:
            raise
        except Exception as error:
            raise ScheduleError(f"{where}: {type(error).__name__}: {error}") from error
        if len(actions) == most:
            raise ScheduleError(
                f"{where}: the device has already {most} actions, as many as F, I and W of every "
                "stage and microbatch; does the generator end?"
            )
        actions.append(_action(where, item, device, stages, microbatches))


def _action(
    where: str, item: object, device: int, stages: tuple[int, ...], microbatches: int
) -> Action:
    if isinstance(item, Action):
        return item
    if not isinstance(item, LocalAction):
        hint = " (call it with a microbatch)" if isinstance(item, Kind) else ""
        raise ScheduleError(
            f"{where}: {item!r}{hint} is not an action; yield F(i), B(i), I(i) or W(i)."
        )
    for what, number, count in (
        ("microbatch", item.microbatch, microbatches),
        ("chunk", item.chunk, len(stages)),
    ):
        if integer(number) is None:
            raise ScheduleError(f"{where}: the {what} of {item!r} is not an integer.")
        if not 0 <= number < count:
            have = f"{what} numbers here are 0..{count - 1}" if count else "the device has no stage"
            raise ScheduleError(f"{where}: {item!r} has {what} {number}, but {have}.")
    return Action(stages[item.chunk], item.kind, int(item.microbatch))


def _place(
    name: str, placement: placements.Placement, devices: int, options: Mapping[str, Any]
) -> tuple[int, ...]:
    try:
        placed = placement(devices, **options) if callable(placement) else placement
    except ScheduleError:
        raise
    except Exception as error:
        raise ScheduleError(
            f"Schedule {name}: its placement raised {type(error).__name__}: {error} "
            f"(devices={devices})."
        ) from error
    if isinstance(placed, str) or not isinstance(placed, Sequence) or not placed:
        raise ScheduleError(
            f"Schedule {name}: its placement is {placed!r}, not a tuple of devices."
        )
    found = [integer(device) for device in placed]
    for stage, (device, number) in enumerate(zip(placed, found, strict=True)):
        if number is None or not 0 <= number < devices:
            raise ScheduleError(
                f"Schedule {name}: its placement {tuple(placed)} puts stage {stage} on device "
                f"{device!r}, but devices are 0..{devices - 1}."
            )
    return tuple(number for number in found if number is not None)


def parameters_of(fun: Callable[..., Any], *, skip: int) -> tuple[dict[str, Any], bool]:
    """The options that ``fun`` takes after ``skip`` sizes, and whether it takes any at all."""
    found = list(inspect.signature(fun).parameters.values())
    named = {
        p.name: p.default for p in found[skip:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    return named, any(p.kind == p.VAR_KEYWORD for p in found)


def _unknown_option(name: str, function: str, option: str, known: Iterable[str]) -> str:
    known = list(known)
    close = get_close_matches(option, known, n=1)
    if close:
        advice = f"did you mean {close[0]}?"
    elif known:
        advice = f"its options are {', '.join(known)}."
    else:
        advice = "it takes none."
    return f"Schedule {name}: {function} has no option {option}; {advice}"


def _written(options: Mapping[str, Any]) -> str:
    """Options as they stand in a schedule's name: ``(chunks=2)``."""
    plain = (int, float, str, bool, type(None))
    parts = [f"{k}={v!r}" if isinstance(v, plain) else f"{k}=…" for k, v in options.items()]
    return f"({', '.join(parts)})" if parts else ""


def _size(name: str, what: str, number: object) -> int:
    size = integer(number)
    if size is None or size < 1:
        raise ScheduleError(f"Schedule {name}: {what} must be an integer >= 1, got {number!r}.")
    return size
