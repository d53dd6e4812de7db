"""From jobs to executables: each distinct program traced and lowered once, compiled per device.

A *job* is one function for one device: its abstract arguments, their shardings on the device's
submesh, and the arguments whose buffers it may overwrite. `compile_jobs` traces and lowers them on
the caller's thread (with the caller's configuration) and lets XLA compile in parallel threads. Jobs
of several devices share one traced function, so JAX's own caches make tracing and lowering happen
once. What a device runs is looked up by a *role*, a tuple such as ``("prologue", stage)``.

This file knows no stages and no instructions; `jaxpipe.lower.jobs` makes the jobs of a step.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

Role = tuple[Hashable, ...]
Callee = Callable[..., list[jax.Array]]


@dataclass(frozen=True, eq=False)
class Job:
    """A function of flat arrays that returns a list, to be compiled for one device."""

    name: str
    fun: Callee
    avals: tuple[Any, ...]
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: Any  # a list of shardings, or one for all results
    donate: tuple[int, ...] = ()


@dataclass
class JobTable:
    """Jobs by identity, and for each device the job of each role."""

    jobs: dict[Hashable, Job] = field(default_factory=dict)
    roles: list[dict[Role, Hashable]] = field(default_factory=list)

    def add(self, device: int, role: Role, key: Hashable, make: Callable[[], Job]) -> None:
        """Give ``role`` of ``device`` the job ``key``, made by ``make`` when it is new."""
        if key not in self.jobs:
            self.jobs[key] = make()
        self.roles[device][role] = key


@dataclass(frozen=True, eq=False)
class Executables:
    """Compiled programs by device and role. ``temporaries[d]``: bytes of d's largest scratch."""

    by_role: tuple[dict[Role, Callee], ...]
    temporaries: tuple[int, ...]
    compiled: int


def compile_jobs(table: JobTable, *, title: str = "pipeline") -> Executables:
    """Trace and lower every job here, compile them in parallel threads.

    Shows progress on stderr when it is a terminal.
    """
    keys = list(table.jobs)
    with _progress(title, len(keys)) as advance:
        lowered = []
        for key in keys:
            lowered.append(_lower(table.jobs[key]))
            advance("tracing and lowering")
        workers = min(len(keys), os.cpu_count() or 1) or 1

        def compile_one(item: jax.stages.Lowered) -> jax.stages.Compiled:
            compiled = item.compile()
            advance("compiling")
            return compiled

        with ThreadPoolExecutor(workers, thread_name_prefix="jaxpipe compile") as pool:
            compiled = dict(zip(keys, pool.map(compile_one, lowered), strict=True))
    scratch = {key: _temporaries(executable) for key, executable in compiled.items()}
    return Executables(
        by_role=tuple(
            {role: compiled[key] for role, key in roles.items()} for roles in table.roles
        ),
        temporaries=tuple(
            max((scratch[key] for key in roles.values()), default=0) for roles in table.roles
        ),
        compiled=len(keys),
    )


def _lower(job: Job) -> jax.stages.Lowered:
    jitted = jax.jit(
        job.fun,
        in_shardings=job.in_shardings,
        out_shardings=job.out_shardings,
        donate_argnums=job.donate,
    )
    with warnings.catch_warnings():
        # A reusable buffer that XLA finds no use for is merely freed.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return jitted.lower(*job.avals)


def _temporaries(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    return int(getattr(analysis, "temp_size_in_bytes", 0) or 0)


@contextmanager
def _progress(title: str, count: int) -> Any:
    """Yields ``advance(phase)``; draws two bars with rich when stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda phase: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        bars = {
            phase: progress.add_task(f"{title}: {phase}", total=count)
            for phase in ("tracing and lowering", "compiling")
        }
        yield lambda phase: progress.advance(bars[phase])
