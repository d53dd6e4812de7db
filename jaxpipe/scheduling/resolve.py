"""`resolve`: whatever a user may give for a schedule, made a `Schedule` of the wanted size.

That is a name (``"1f1b"``), a name with options (``"interleaved(chunks=4)"``, whose values are
Python literals), a schedule function, a `functools.partial` of one, or a finished `Schedule`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.schedule import Schedule

_CALL = re.compile(r"\s*([\w.+-]+)\s*(\(.*\))?\s*", re.DOTALL)


def resolve(
    schedule: str | Schedule | Callable[..., Schedule], devices: int, microbatches: int
) -> Schedule:
    """The schedule for these sizes.

    >>> resolve("1f1b", devices=2, microbatches=2)
    Schedule('1f1b', devices=2, stages=2, microbatches=2)

    Raises `ScheduleError` for an unknown name (with names like it), for options that the schedule
    does not take, and for a finished schedule of another size.
    """
    if isinstance(schedule, str):
        function, options = named(schedule)
        return function(devices=devices, microbatches=microbatches, **options)
    if isinstance(schedule, Schedule):
        made, name = schedule, f"the schedule {schedule.name}".rstrip()
    elif callable(schedule):
        try:
            made = schedule(devices=devices, microbatches=microbatches)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise ScheduleError(
                    f"{schedule!r} cannot be called as a schedule function, with devices= and "
                    f"microbatches=: {error}. Decorate its generator with @jaxpipe.schedule."
                ) from error
            raise
        name = f"what {getattr(schedule, '__name__', schedule)!r} returned"
    else:
        raise ScheduleError(
            f"{schedule!r} is no schedule; give a name, a schedule function or a Schedule."
        )
    if not isinstance(made, Schedule):
        raise ScheduleError(
            f"{name} is {_short(made)}, not a Schedule. Decorate its generator with "
            "@jaxpipe.schedule."
        )
    for what, wanted in (("devices", devices), ("microbatches", microbatches)):
        if getattr(made, what) != wanted:
            raise ScheduleError(
                f"{name} is for {getattr(made, what)} {what}, but {wanted} {what} are asked for."
            )
    return made


def named(text: str) -> tuple[Callable[..., Schedule], dict[str, Any]]:
    """The library's schedule function that ``text`` names, and the options it gives.

    >>> named("interleaved(chunks=4)")
    (<schedule function interleaved>, {'chunks': 4})
    """
    if re.search(r"\.(py|json|txt|csv)\s*$|[/\\]", text):
        raise ScheduleError(
            f"{text!r} looks like a file; give jaxpipe.Schedule.load(path) for .json, .txt and "
            ".csv, and import the schedule function of a .py file."
        )
    if "\n" in text.strip() or re.fullmatch(r"\s*\d+[FBIW]\d+\s.*", text):
        raise ScheduleError(
            "the text of a schedule was given for the name of one; give "
            "jaxpipe.Schedule.parse(text)."
        )
    name, options = split_call(text)
    schedules = import_module("jaxpipe.schedules")  # itself written in the public DSL
    known = list(schedules.names())
    if name not in known:
        close = get_close_matches(name, known, n=3, cutoff=0.5)
        advice = (
            f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}."
        )
        raise ScheduleError(f"There is no schedule {name!r} in the library; {advice}")
    return schedules.get(name), options


def split_call(text: str) -> tuple[str, dict[str, Any]]:
    """A name and the options behind it.

    >>> split_call("interleaved(chunks=4)")
    ('interleaved', {'chunks': 4})
    """
    found = _CALL.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"{text!r} is not the name of a schedule; write a name, or a name with options such "
            'as "interleaved(chunks=4)".'
        )
    name, call = found.groups()
    return name, _options(text, call or "()")


def _options(text: str, call: str) -> dict[str, Any]:
    try:
        node = ast.parse(f"_{call}", mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("not a call")
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("options are given by name")
        return {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error).split(":")[0]
        raise ScheduleError(
            f"The options of {text!r} cannot be read ({reason}); write name=value pairs whose "
            'values are Python literals, as in "interleaved(chunks=4)".'
        ) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
