"""Initial parameters, each leaf computed where it lives.

``init_fn`` is traced once, and for each device all but the equations that its own leaves need are
dropped. No device, and so no process, ever holds the whole model. A tied leaf is computed on its
home device and sent to the others. This file knows no stages and no schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from jaxpipe.lower.compile import Job, JobTable, compile_jobs
from jaxpipe.lower.place import Layout


def init_placed(init_fn: Callable, args: Sequence[Any], layout: Layout) -> Any:
    """``init_fn(*args)`` in the placed form of ``layout``, whose leaves are those of its result."""
    closed, shapes = jax.make_jaxpr(init_fn, return_shape=True)(*args)
    inputs = jax.tree.leaves(args)
    table = JobTable(roles=[{} for _ in range(layout.devices)])
    needed: dict[int, list[int]] = {}
    own: dict[int, list[int]] = {}
    for device in range(layout.devices):
        leaves = [i for i, owners in enumerate(layout.owners) if owners[0] == device]
        if not leaves:
            continue
        own[device] = leaves
        part, needed[device] = _part(closed, set(leaves))
        table.add(device, ("init",), device, lambda p=part, d=device: _job(p, layout, d, own[d]))  # type: ignore[misc]
    executables = compile_jobs(table, title="init")
    made: dict[int, jax.Array] = {}
    for device, leaves in own.items():
        here = jax.device_put([inputs[i] for i in needed[device]], layout.replicated[device])
        results = executables.by_role[device]["init",](*here)
        made.update(zip(leaves, results, strict=True))
    placed = [
        made[i] if len(owners) == 1 else jax.device_put(made[i], layout.shardings[i])
        for i, owners in enumerate(layout.owners)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), placed)


def _part(closed: ClosedJaxpr, leaves: set[int]) -> tuple[ClosedJaxpr, list[int]]:
    """The program of some results alone, and the positions of the inputs that it reads."""
    jaxpr, used = partial_eval.dce_jaxpr(
        closed.jaxpr, [i in leaves for i in range(len(closed.jaxpr.outvars))]
    )
    return ClosedJaxpr(jaxpr, closed.consts), list(np.flatnonzero(used))


def _job(part: ClosedJaxpr, layout: Layout, device: int, leaves: Sequence[int]) -> Job:
    evaluate = jaxpr_as_fun(part)

    def init_parameters(*args: Any) -> list[Any]:
        return list(evaluate(*args))

    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in part.in_avals)
    return Job(
        name=f"initial parameters of device {device}",
        fun=init_parameters,
        avals=avals,
        in_shardings=(layout.replicated[device],) * len(avals),
        out_shardings=[layout.local[device][leaf] for leaf in leaves],
    )
