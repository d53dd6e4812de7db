"""The generator form: say each device's order, in a few lines.

``@schedule`` turns a generator of actions as its device sees them (`kinds`) into a *schedule
function*, which is called with sizes and options and returns a checked `Schedule`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import placements
from jaxpipe.scheduling.kinds import B, F, I, Kind, LocalAction, W
from jaxpipe.scheduling.schedule_function import Order, ScheduleFunction, parameters_of

__all__ = ["B", "F", "I", "Kind", "LocalAction", "ScheduleFunction", "W", "schedule"]


@overload
def schedule(fun: Callable[..., Order], /) -> ScheduleFunction: ...
@overload
def schedule(
    *,
    placement: placements.Placement = ...,
    stages: int | Callable[..., int] | None = ...,
    name: str | None = ...,
) -> Callable[[Callable[..., Order]], ScheduleFunction]: ...
def schedule(
    fun: Callable[..., Order] | None = None,
    /,
    *,
    placement: placements.Placement = placements.linear,
    stages: int | Callable[..., int] | None = None,
    name: str | None = None,
) -> Any:
    """Make a schedule function of a generator ``fun(device, devices, microbatches, **options)``.

    ``fun`` yields the actions of one device in order. ``placement``: a function of the number of
    devices (options that it accepts are passed on), or a tuple. ``stages``: the number of stages,
    to be compared with the placement's. ``name``: of the schedules, by default the function's.

    >>> @schedule
    ... def gpipe(device, devices, microbatches):
    ...     yield from map(F, range(microbatches))
    ...     yield from map(B, range(microbatches))
    >>> print(gpipe(devices=2, microbatches=2))
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    >>> gpipe.stages(devices=4)
    4

    The result raises `ScheduleError` naming the device, the position and the action.
    """
    if fun is None:
        return lambda fun: _make(fun, placement, stages, name)
    return _make(fun, placement, stages, name)


def _make(
    fun: Callable[..., Order],
    placement: placements.Placement,
    stages: int | Callable[..., int] | None,
    name: str | None,
) -> ScheduleFunction:
    if not callable(fun):
        raise ScheduleError(f"@schedule decorates a generator function, got {fun!r}.")
    try:
        inspect.signature(fun).bind_partial(0, 1, 1)
    except ValueError:
        raise ScheduleError(
            f"@schedule decorates a generator function, got {fun!r}, whose signature is not known."
        ) from None
    except TypeError:
        raise ScheduleError(
            f"@schedule: {getattr(fun, '__name__', fun)} must take (device, devices, "
            f"microbatches, **options), but its signature is {inspect.signature(fun)}."
        ) from None
    options, any_option = parameters_of(fun, skip=3)

    def order(device: int, devices: int, microbatches: int, **options: Any) -> object:
        """What ``fun`` returns; an error raised by calling it comes when the order is read."""
        try:
            return fun(device, devices, microbatches, **options)
        except Exception as error:
            return _raising(error)

    def build(
        devices: int, microbatches: int, placement: tuple[int, ...], **options: Any
    ) -> Iterable[Any]:
        for device in range(devices):
            yield order(device, devices, microbatches, **options)

    return ScheduleFunction(
        build,
        name=str(name or getattr(fun, "__name__", "schedule")),
        doc=fun.__doc__,
        placement=placement,
        stages=stages,
        options=options,
        any_option=any_option,
        wrapped=fun,
    )


def _raising(error: Exception) -> Iterator[LocalAction]:
    raise error
    yield
