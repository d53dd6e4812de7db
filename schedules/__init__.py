"""The schedule library: one readable file per family, written as a user would write them.

`names()` lists the schedules, `get(name)` returns one as a *schedule function*: called with
``devices``, ``microbatches`` and its own options it returns a `Schedule`. In their docstrings P is
the number of devices, M that of microbatches, v that of chunks on a device, and F, B, I, W are a
device's times for one microbatch, all its chunks together; transfers take no time unless said.
*Makespan* and *span* are those of `jaxpipe.Timeline`.
"""

from __future__ import annotations

from difflib import get_close_matches

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import ScheduleFunction

from .gpipe import gpipe
from .interleaved import interleaved
from .one_f_one_b import one_f_one_b
from .vee import zb_v
from .zero_bubble import zb_h1

_LIBRARY: dict[str, ScheduleFunction] = {
    each.__name__: each for each in (gpipe, one_f_one_b, interleaved, zb_h1, zb_v)
}

__all__ = ["get", "gpipe", "interleaved", "names", "one_f_one_b", "zb_h1", "zb_v"]


def names() -> tuple[str, ...]:
    """The names of the library's schedules.

    >>> names()
    ('gpipe', '1f1b', 'interleaved', 'zb_h1', 'zb_v')
    """
    return tuple(_LIBRARY)


def get(name: str) -> ScheduleFunction:
    """The schedule function of this name. Raises `ScheduleError` for a name that there is not.

    >>> get("1f1b").stages(devices=4)
    4
    """
    if name in _LIBRARY:
        return _LIBRARY[name]
    plain, options, _ = str(name).partition("(")
    if options and plain in _LIBRARY:
        raise ScheduleError(
            f"{name!r} is a name with options; give them when you call the function: "
            f"get({plain!r})(devices=..., microbatches=..., {options.rstrip(')')})."
        )
    close = get_close_matches(str(name), _LIBRARY, n=1, cutoff=0.5)
    advice = f"Did you mean {close[0]!r}? " if close else ""
    raise ScheduleError(
        f"There is no schedule {name!r} in the library. {advice}It has {', '.join(_LIBRARY)}."
    )
