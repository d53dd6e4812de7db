"""Placements: which device holds which stage.

A placement is a function of the number of devices (and of its own options) that returns a tuple:
entry s is the device of stage s. Any such function, or a finished tuple, may stand in place of
those below. This file knows nothing of orders.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxpipe.errors import ScheduleError

Placement = Callable[..., tuple[int, ...]] | tuple[int, ...]


def linear(devices: int) -> tuple[int, ...]:
    """One stage per device, in order.

    >>> linear(4)
    (0, 1, 2, 3)
    """
    _at_least_one("linear", "devices", devices)
    return tuple(range(devices))


def loop(devices: int, chunks: int = 2) -> tuple[int, ...]:
    """Stage s on device s mod devices: every device holds ``chunks`` stages (arXiv 2104.04473).

    >>> loop(3, chunks=2)
    (0, 1, 2, 0, 1, 2)
    """
    _at_least_one("loop", "devices", devices)
    _at_least_one("loop", "chunks", chunks)
    return tuple(range(devices)) * chunks


def vee(devices: int) -> tuple[int, ...]:
    """Down the devices and back up: device d holds stages d and 2 devices - 1 - d (2405.15362).

    >>> vee(3)
    (0, 1, 2, 2, 1, 0)
    """
    _at_least_one("vee", "devices", devices)
    return wave(devices, w=1)


def wave(devices: int, w: int = 1) -> tuple[int, ...]:
    """``w`` times down the devices and back up, 2w stages on each device (arXiv 2308.15762).

    >>> wave(2, w=2)
    (0, 1, 1, 0, 0, 1, 1, 0)
    """
    _at_least_one("wave", "devices", devices)
    _at_least_one("wave", "w", w)
    down = tuple(range(devices))
    return (down + down[::-1]) * w


def _at_least_one(placement: str, what: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ScheduleError(
            f"placement {placement}: {what} must be an integer >= 1, got {number!r}"
        )
