"""Trace: a user's function and shapes -> one flat forward program with its segments.

`trace` runs the function once on abstract values, inlines nested jits, and says for every equation
to which *segment* it belongs: the highest-numbered boundary among its ancestors. Equations with no
boundary above them are segment 0, except those of parameters only, or of batch leaves and keys
only: these *float* (segment None) to whoever uses them. Nothing here knows of stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as prims

from jaxpipe.capture import _jax_compat as compat
from jaxpipe.capture._jax_compat import Atom, Equation, Var
from jaxpipe.capture.boundary import stage_boundary_p
from jaxpipe.capture.flat import Flat, flatten, is_var, prune, sub_jaxprs
from jaxpipe.capture.flops import flops
from jaxpipe.errors import PipelineError

# What a variable depends on, as bits.
PARAMS = 1
DATA = 2  # batch leaves and keys
TRAINED = 4  # a parameter that can have a gradient (inexact dtype)


@dataclass(frozen=True)
class Segment:
    """The part of the model between two boundaries.

    ``lines``: where it is in the user's source. ``name``: the name of the boundary that opens it.
    ``flops``: forward operations for one microbatch.
    """

    index: int
    lines: str
    name: str | None
    flops: float


@dataclass(frozen=True)
class Traced:
    """A function's forward program for one microbatch.

    ``segment_of[i]`` is the segment of ``flat.eqns[i]``, or None where the equation floats.
    ``depends[var]`` are the bits `PARAMS`, `DATA`, `TRAINED`. The first ``len(param_avals)``
    inputs are parameters, the rest batch leaves (and the key). Boundaries are gone;
    ``unused_marks`` are the source lines of those whose results nothing reads.
    """

    flat: Flat
    segment_of: tuple[int | None, ...]
    depends: dict[Var, int]
    segments: tuple[Segment, ...]
    param_avals: tuple[Any, ...]
    param_paths: tuple[str, ...]
    batch_avals: tuple[Any, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]
    unused_marks: tuple[str, ...] = ()


def trace(fun: Callable, args: Sequence[Any], *, param_argnum: int = 0) -> Traced:
    """Trace ``fun(*args)`` on shapes and find its segments.

    Args:
      fun: the user's loss function.
      args: one pytree of `jax.ShapeDtypeStruct` (or arrays) for each argument; those other than
        ``param_argnum`` are of one microbatch.
      param_argnum: which argument holds the parameters.

    Raises:
      PipelineError: for a boundary where the model cannot be cut, and for ordered effects.
    """
    args = list(args)
    params = args.pop(param_argnum)

    def flat_fun(params, *rest):
        rest = list(rest)
        rest.insert(param_argnum, params)
        result = fun(*rest)
        _refuse_non_arrays(result)
        return result

    # A new function object each time: make_jaxpr caches by identity and would miss a new closure.
    closed, out_shape = jax.make_jaxpr(flat_fun, return_shape=True)(params, *args)
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(params)
    flat = flatten(closed)
    num_params = len(paths_and_leaves)
    refuse_what_cannot_be_cut(flat.eqns)
    eqns = prune(flat.eqns, flat.outvars)
    avals = [v.aval for v in flat.invars]
    located = _segments_of(flat, eqns, num_params)
    return Traced(
        flat=located.flat,
        segment_of=located.segment_of,
        depends=located.depends,
        segments=_describe(located),
        param_avals=tuple(avals[:num_params]),
        param_paths=tuple(jax.tree_util.keystr(p) for p, _ in paths_and_leaves),
        batch_avals=tuple(avals[num_params:]),
        out_tree=jax.tree.structure(out_shape),
        out_avals=tuple(a.aval for a in flat.outvars),
        unused_marks=_unused_marks(flat.eqns, eqns),
    )


def _refuse_non_arrays(result: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        try:
            jax.typeof(leaf)
        except TypeError as error:
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise PipelineError(
                f"the function returns a {type(leaf).__name__}{where}, {leaf!r}, which is no "
                "array. Return arrays and numbers alone."
            ) from error


_NO_BOUNDARY_IN = {
    "remat2": "jax.checkpoint",
    "checkpoint": "jax.checkpoint",
    "cond": "lax.cond",
    "while": "lax.while_loop",
    "custom_jvp_call": "a jax.custom_jvp function",
    "custom_vjp_call": "a jax.custom_vjp function",
    "custom_vjp_call_jaxpr": "a jax.custom_vjp function",
    "shard_map": "shard_map",
    "scan": "lax.scan (or lax.fori_loop)",
}


def refuse_what_cannot_be_cut(eqns: Sequence[Equation]) -> None:
    """Raise for boundaries inside other control structures, and for ordered effects."""
    for eqn in eqns:
        for effect in eqn.effects:
            if compat.is_ordered(effect):
                raise PipelineError(
                    f"{compat.source_line(eqn)}: {eqn.primitive} has an ordered effect ({effect}), "
                    "but passes of a pipeline run at the same time on several devices; use the "
                    "unordered form (for example jax.debug.print without ordered=True)"
                )
        for body in sub_jaxprs(eqn):
            mark = _find_boundary(body)
            if mark is not None:
                where = _NO_BOUNDARY_IN.get(eqn.primitive.name, eqn.primitive.name)
                advice = (
                    "write the layers as a Python loop"
                    if eqn.primitive is prims.scan_p
                    else f"move it out of {where}, before or after the call"
                )
                line = compat.source_line(mark if compat.has_source(mark) else eqn)
                raise PipelineError(
                    f"{line}: stage_boundary stands inside {where} "
                    f"(entered at {compat.source_line(eqn)}); the model cannot be cut there. "
                    f"To mend it, {advice}."
                )


def _find_boundary(jaxpr: Any) -> Equation | None:
    for eqn in jaxpr.eqns:
        if eqn.primitive is stage_boundary_p:
            return eqn
        for body in sub_jaxprs(eqn):
            found = _find_boundary(body)
            if found is not None:
                return found
    return None


@dataclass(frozen=True)
class _Located:
    flat: Flat
    segment_of: tuple[int | None, ...]
    depends: dict[Var, int]
    marks: tuple[Equation, ...]


def _segments_of(flat: Flat, eqns: Sequence[Equation], num_params: int) -> _Located:
    """Number boundaries in program order, give each equation its segment, drop the boundaries."""
    depends: dict[Var, int] = dict.fromkeys(flat.constants, 0)
    for i, v in enumerate(flat.invars):
        trained = TRAINED if jnp.issubdtype(v.aval.dtype, jnp.inexact) else 0
        depends[v] = PARAMS | trained if i < num_params else DATA
    # A boundary's output stands for its input, but everything computed from it is in its segment.
    segment: dict[Var, int] = {}
    alias: dict[Var, Atom] = {}
    marks: list[Equation] = []
    kept, segment_of = [], []
    for eqn in eqns:
        reads = [a for a in eqn.invars if is_var(a)]
        if eqn.primitive is stage_boundary_p:
            marks.append(eqn)
            for source, out in zip(eqn.invars, eqn.outvars, strict=True):
                alias[out] = alias.get(source, source) if is_var(source) else source
                segment[out] = len(marks)
                depends[out] = depends.get(source, 0) if is_var(source) else 0
            continue
        bits = 0
        for a in reads:
            bits |= depends[a]
        above = [segment[a] for a in reads if a in segment]
        where: int | None
        if above:
            where = max(above)
        elif (bits & PARAMS and bits & DATA) or eqn.effects:
            where = 0
        else:
            where = None
        for out in eqn.outvars:
            depends[out] = bits
            if where is not None:
                segment[out] = where
        kept.append(eqn.replace(invars=[_resolve(alias, a) for a in eqn.invars]))
        segment_of.append(where)
    outvars = tuple(_resolve(alias, a) for a in flat.outvars)
    return _Located(
        Flat(flat.invars, tuple(kept), outvars, flat.constants),
        tuple(segment_of),
        depends,
        tuple(marks),
    )


def _unused_marks(eqns: Sequence[Equation], kept: Sequence[Equation]) -> tuple[str, ...]:
    read = {id(eqn) for eqn in kept}
    return tuple(
        compat.source_line(eqn)
        for eqn in eqns
        if eqn.primitive is stage_boundary_p and id(eqn) not in read
    )


def _resolve(alias: dict[Var, Atom], atom: Atom) -> Atom:
    return alias.get(atom, atom) if is_var(atom) else atom


def _describe(located: _Located) -> tuple[Segment, ...]:
    flat, marks = located.flat, located.marks
    members: list[list[Equation]] = [[] for _ in range(len(marks) + 1)]
    for eqn, where in zip(flat.eqns, located.segment_of, strict=True):
        if where is not None:
            members[where].append(eqn)
    segments = []
    for index, eqns in enumerate(members):
        opener = marks[index - 1] if index else None
        segments.append(
            Segment(
                index=index,
                lines=source_range(([opener] if opener else []) + eqns),
                name=opener.params["name"] if opener else None,
                flops=flops(eqns),
            )
        )
    return tuple(segments)


def source_range(eqns: Sequence[Equation]) -> str:
    """``file:first-last``: the lines of the user's file that most of these equations are from."""
    places = [p for p in map(compat.source_position, eqns) if p]
    if not places:
        return "(no source line)"
    file = Counter(f for f, _ in places).most_common(1)[0][0]
    lines = [line for f, line in places if f == file]
    first, last = min(lines), max(lines)
    return f"{file}:{first}" if first == last else f"{file}:{first}-{last}"
