"""What the command line takes for a schedule: a name of the library, or a file of one's own.

A *source* is the text after ``--schedule``: a name such as ``1f1b`` or ``interleaved(chunks=4)``,
a ``.py`` file that defines a schedule (``file.py:name`` where it defines several,
``file.py:name(lag=2)`` with options), or a saved
schedule (``.json``, ``.txt``, ``.csv``). This file knows nothing of models, and no jax.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.dsl import ScheduleFunction
from jaxpipe.scheduling.resolve import named, resolve, split_call
from jaxpipe.scheduling.schedule import Schedule

DEVICES, MICROBATCHES = 4, 8  # where nothing else says how many
SAVED = (".json", ".txt", ".csv")
_MODULE = "jaxpipe_schedule_file"

Source = Schedule | Callable[..., Schedule]


def read_source(source: str) -> Source:
    """The schedule (saved files, ``.py`` files) or schedule function that ``source`` names.

    >>> read_source("1f1b")(devices=2, microbatches=2).placement
    (0, 1)

    Raises `ScheduleError`: an unknown name (with names near it), a missing file, or a file that
    defines no schedule or several.
    """
    path, _, name = source.partition(".py:")
    path = f"{path}.py" if name else source
    if source.endswith(SAVED):
        return Schedule.load(_existing(source))
    if path.endswith(".py"):
        return _from_python(_existing(path), name)
    file = any(mark in source for mark in ("/", "\\")) or Path(source).is_file()
    if file or re.fullmatch(r"[^()]*\.[A-Za-z]\w*", source):
        raise ScheduleError(
            f"{source} is neither a name of the library nor a kind of file that holds a schedule: "
            "use .py (your own code), or .json, .txt or .csv (saved)."
        )
    function, options = named(source)
    return functools.partial(function, **options) if options else function


def build(
    source: Source, *, called: str, devices: int | None, microbatches: int | None
) -> Schedule:
    """The schedule of ``source`` for these sizes, checked; ``called`` is its text, for errors.

    A schedule function is called with the sizes (`DEVICES`, `MICROBATCHES` where one is None). A
    finished schedule has its own sizes; a size that is given must be equal.

    >>> build(read_source("1f1b"), called="1f1b", devices=2, microbatches=None)
    Schedule('1f1b', devices=2, stages=2, microbatches=8)
    """
    if not isinstance(source, Schedule):
        return resolve(source, devices or DEVICES, microbatches or MICROBATCHES)
    for what, given in (("devices", devices), ("microbatches", microbatches)):
        own = getattr(source, what)
        if given is not None and given != own:
            raise ScheduleError(
                f"The schedule in {called} is for {own} {what}, but --{what} is {given}. "
                f"Leave out --{what}, or write a schedule function, which works for any number."
            )
    source.check()
    return source


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ScheduleError(f"There is no file {path}.")
    return Path(path)


def _from_python(path: Path, name: str) -> Source:
    module = _run(path)
    if name:
        name, options = split_call(name)
        if not hasattr(module, name):
            known = ", ".join(_defined(module)) or "no schedule"
            raise ScheduleError(f"{path} does not define {name}; it defines {known}.")
        found = getattr(module, name)
        if not isinstance(found, Schedule) and not callable(found):
            raise ScheduleError(
                f"{name} in {path} is {found!r}, neither a schedule nor a function."
            )
        if options and isinstance(found, Schedule):
            raise ScheduleError(f"{name} in {path} is a finished schedule and takes no options.")
        return functools.partial(found, **options) if options else found
    defined = _defined(module)
    if not defined:
        raise ScheduleError(f"{path} defines no schedule.{_forgotten(module)}")
    functions = [each for each in defined.values() if not isinstance(each, Schedule)]
    if len(functions) == 1:  # a Schedule beside it was made to be looked at
        return functions[0]
    if len(defined) > 1:
        raise ScheduleError(
            f"{path} defines {len(defined)} schedules: {', '.join(defined)}. "
            f"Say which one: {path}:{next(iter(defined))}"
        )
    return next(iter(defined.values()))


def _run(path: Path) -> ModuleType:
    """Import ``path`` under a name of its own; files beside it can be imported by it."""
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None and spec.loader is not None  # true of every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except ScheduleError:
        raise
    except Exception as error:
        raise ScheduleError(f"{_place(error, path)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def _place(error: Exception, path: Path) -> str:
    """``file:line`` of the last frame in the user's file, where the error has one."""
    if isinstance(error, SyntaxError):
        return f"{path}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == path.name]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _defined(module: ModuleType) -> dict[str, Source]:
    """Schedules and schedule functions that the file makes itself (not those it imports)."""
    import jaxpipe.schedules as library

    imported = {id(library.get(name)) for name in library.names()}
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if not _is_schedule(value) or id(value) in imported:
            continue
        if all(value is not other for other in found.values()):
            found[name] = value
    return found


def _is_schedule(value: object) -> bool:
    if isinstance(value, functools.partial):
        return _is_schedule(value.func)
    return isinstance(value, Schedule | ScheduleFunction)


def _forgotten(module: ModuleType) -> str:
    """A hint where the file has generator functions without the decorator."""
    plain = [
        name
        for name, value in vars(module).items()
        if inspect.isgeneratorfunction(value) and value.__module__ == _MODULE
    ]
    return (
        f" Does {plain[0]} lack its @jp.schedule?"
        if plain
        else (" A schedule is a generator function under @jp.schedule, or a Schedule.")
    )
