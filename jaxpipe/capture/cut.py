"""Cut: a traced program and a grouping of its segments -> one straight-line program per stage.

An equation of a segment belongs to the stage that holds the segment. Floating equations go to the
stages that use them: those of parameters or of nothing, and cheap ones of batch leaves, are
repeated in each; dear ones are computed once, on the earliest, and sent on. What a stage reads
from another is an *edge*. Nothing here knows of derivatives or of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpipe.capture import recompute
from jaxpipe.capture._jax_compat import Atom, Equation, Var
from jaxpipe.capture.flat import free_variables, is_var, nbytes, prune
from jaxpipe.capture.trace import DATA, PARAMS, TRAINED, Traced

# A result up to this size is cheaper to repeat than to send, whatever computes it (keys, masks).
REPEAT_NBYTES = 4096


@dataclass(frozen=True)
class StageCut:
    """The forward program of one stage.

    ``params``, ``batch``: flat positions of the leaves it reads; ``constants``: variables of arrays
    that the model closed over. ``edges``: variables made by earlier stages. ``sends``: variables
    that later stages read. ``outputs``: pairs (flat position in the function's result, atom).
    """

    index: int
    segments: tuple[int, ...]
    eqns: tuple[Equation, ...]
    params: tuple[int, ...]
    constants: tuple[Var, ...]
    batch: tuple[int, ...]
    edges: tuple[Var, ...]
    sends: tuple[Var, ...]
    outputs: tuple[tuple[int, Atom], ...]


def cut(traced: Traced, groups: Sequence[int]) -> tuple[StageCut, ...]:
    """Cut the program into ``len(groups)`` stages of ``groups[s]`` consecutive segments."""
    stage_of_segment = [s for s, count in enumerate(groups) for _ in range(count)]
    if len(stage_of_segment) != len(traced.segments):
        raise ValueError(f"{groups} does not sum to {len(traced.segments)} segments")
    flat = traced.flat
    last = len(groups) - 1
    homes, uses = _place(traced, stage_of_segment, last)
    made_in = {v: s for e, s in zip(flat.eqns, homes, strict=True) if s is not None
               for v in e.outvars}  # fmt: skip
    position = {v: i for i, v in enumerate(flat.invars)}
    num_params = len(traced.param_avals)

    outputs: list[list[tuple[int, Atom]]] = [[] for _ in groups]
    for i, atom in enumerate(flat.outvars):
        outputs[_output_stage(atom, made_in, last)].append((i, atom))

    mine: list[list[Equation]] = [[] for _ in groups]
    for eqn, home, stages in zip(flat.eqns, homes, uses, strict=True):
        for s in [home] if home is not None else sorted(stages):
            mine[s].append(eqn)

    # From the last stage to the first, so that a stage knows what later ones read of it.
    wanted: list[dict[Var, None]] = [{} for _ in groups]
    bodies: list[tuple[list[Equation], list[Var]]] = []
    for s in reversed(range(len(groups))):
        results = list(wanted[s]) + [a for _, a in outputs[s]]
        eqns = prune(mine[s], results)
        free = free_variables(eqns, results)
        for v in free:
            if v in made_in and made_in[v] != s:
                wanted[made_in[v]][v] = None
        bodies.append((eqns, free))
    bodies.reverse()

    cuts = []
    for s, (eqns, free) in enumerate(bodies):
        leaves = [position[v] for v in free if v in position]
        first = sum(groups[:s])
        cuts.append(
            StageCut(
                index=s,
                segments=tuple(range(first, first + groups[s])),
                eqns=tuple(eqns),
                params=tuple(i for i in leaves if i < num_params),
                constants=tuple(v for v in free if v in flat.constants),
                batch=tuple(i - num_params for i in leaves if i >= num_params),
                edges=tuple(v for v in free if v in made_in and made_in[v] != s),
                sends=tuple(wanted[s]),
                outputs=tuple(outputs[s]),
            )
        )
    return tuple(cuts)


def _output_stage(atom: Atom, made_in: dict[Var, int], last: int) -> int:
    return made_in.get(atom, last) if is_var(atom) else last


def _place(
    traced: Traced, stage_of_segment: Sequence[int], last: int
) -> tuple[list[int | None], list[set[int]]]:
    """For each equation: its one stage, or None and the set of stages that repeat it."""
    eqns = traced.flat.eqns
    homes: list[int | None] = [
        None if where is None else stage_of_segment[where] for where in traced.segment_of
    ]
    used_by: dict[Var, set[int]] = {}
    for atom in traced.flat.outvars:
        if is_var(atom):
            used_by.setdefault(atom, set()).add(last)
    uses: list[set[int]] = [set() for _ in eqns]
    for i in reversed(range(len(eqns))):
        eqn = eqns[i]
        home = homes[i]
        if home is None:
            stages = set().union(*(used_by.get(v, set()) for v in eqn.outvars))
            if len(stages) > 1 and not _is_cheap(traced, eqn):
                home = homes[i] = min(stages)
            uses[i] = stages
        else:
            stages = {home}
        for a in eqn.invars:
            if is_var(a):
                used_by.setdefault(a, set()).update({home} if home is not None else stages)
    return homes, uses


def _is_cheap(traced: Traced, eqn: Equation) -> bool:
    """Whether to repeat a floating equation in every stage that uses it, rather than send it."""
    bits = 0
    for a in eqn.invars:
        if is_var(a):
            bits |= traced.depends[a]
    return (
        not bits & DATA
        or bool(bits & PARAMS)
        or recompute.is_cheap(eqn)
        or sum(nbytes(v.aval) for v in eqn.outvars) <= REPEAT_NBYTES
    )


def carries_gradient(traced: Traced, var: Var) -> bool:
    """Whether a gradient may have to flow back through this variable."""
    return bool(traced.depends[var] & TRAINED) and jnp.issubdtype(var.aval.dtype, jnp.inexact)
