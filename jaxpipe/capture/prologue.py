"""Prologue: what a stage computes from parameters alone is computed once per step.

Casts to bfloat16, LoRA merges, weight normalisation and slices of stacked weights do not depend on
the microbatch. `split_prologue` takes them out of a stage's program; their results are *resident*,
like parameters. Their gradients are accumulated over the microbatches at the point where the cast
to the compute dtype begins (so that nothing is rounded on the way), and their transpose, the
*epilogue*, runs once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend.core import primitives as prims

from jaxpipe.capture import _jax_compat as compat
from jaxpipe.capture import recompute
from jaxpipe.capture._jax_compat import Equation, Var
from jaxpipe.capture.dtypes import accumulator_dtype
from jaxpipe.capture.flat import close, flatten, free_variables, is_var, nbytes, prune
from jaxpipe.capture.trace import DATA, PARAMS


@dataclass(frozen=True)
class Split:
    """``once``: equations of the prologue; ``results``: its results that ``rest`` reads."""

    once: tuple[Equation, ...]
    results: tuple[Var, ...]
    rest: tuple[Equation, ...]


def split_prologue(
    eqns: Sequence[Equation],
    outvars: Sequence[Any],
    depends: dict[Var, int],
    edges: Sequence[Var] = (),
) -> Split:
    """Split a stage's equations into those of parameters only and the rest.

    What follows from ``edges`` stays with the rest, for edges arrive with each microbatch, even
    those that an earlier stage made of parameters alone.

    Layout changes (broadcast, reshape, transpose) and equations that make more bytes than they
    read stay with the rest when only the rest uses them: they cost nothing there, and their
    results would be larger than the parameter.
    """
    kept: set[Var] = set()  # read by an equation that is in the prologue
    late = set(edges)
    for eqn in eqns:
        if any(is_var(a) and a in late for a in eqn.invars):
            late.update(eqn.outvars)
    once_reversed = []
    for eqn in reversed(eqns):
        bits = 0
        for a in eqn.invars:
            if is_var(a):
                bits |= depends[a]
        if not bits & PARAMS or bits & DATA or eqn.effects or late.intersection(eqn.outvars):
            continue
        grows = sum(nbytes(v.aval) for v in eqn.outvars) > sum(
            nbytes(a.aval) for a in eqn.invars if is_var(a)
        )
        trailing = not any(v in kept for v in eqn.outvars)
        if trailing and (grows or eqn.primitive.name in recompute.LAYOUT):
            continue
        once_reversed.append(eqn)
        kept.update(a for a in eqn.invars if is_var(a))
    chosen = {id(e) for e in once_reversed}
    rest = prune([e for e in eqns if id(e) not in chosen], outvars)
    made = {v for e in once_reversed for v in e.outvars}
    results = [v for v in free_variables(rest, outvars) if v in made]
    once = prune(eqns, results) if results else []  # with the constants-only work it needs
    once = [e for e in once if not e.effects]
    return Split(tuple(once), tuple(results), tuple(rest))


def before_casts(var: Var, once: Sequence[Equation]) -> Var:
    """The variable that ``var`` is a float cast of (of a cast of ...), or itself."""
    maker = {v: e for e in once for v in e.outvars}
    while var in maker and maker[var].primitive is prims.convert_element_type_p:
        source = maker[var].invars[0]
        if not is_var(source) or not jnp.issubdtype(source.aval.dtype, jnp.floating):
            break
        if not jnp.issubdtype(var.aval.dtype, jnp.floating):
            break
        var = source
    return var


def epilogue_jaxpr(
    params: Sequence[Var],
    constants: Sequence[Var],
    once: Sequence[Equation],
    bases: Sequence[Var],
    accumulator_avals: Sequence[Any],
    grad_dtype: Any,
) -> tuple[Any | None, tuple[int, ...]]:
    """The program from accumulated gradients of ``bases`` to gradients of parameters.

    Returns (closed jaxpr, positions in ``params`` that get a gradient). The jaxpr is None where
    every base is itself a parameter: then accumulator k is the gradient of that parameter.
    """
    position = {v: i for i, v in enumerate(params)}
    if all(b in position for b in bases):
        return None, tuple(position[b] for b in bases)
    trained = [v for v in params if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    computed = [b for b in bases if b not in position]
    body = compat.closed_jaxpr([*params, *constants], prune(once, computed), computed)
    run = jex.jaxpr_as_fun(body)
    reached = _depends_on(once, set(trained), computed)
    wanted = [v for v in trained if v in reached]

    def epilogue(param_values, constant_values, accumulators):
        values = dict(zip(params, param_values, strict=True))

        def forward(*chosen):
            now = {**values, **dict(zip(wanted, chosen, strict=True))}
            return run(*(now[v] for v in params), *constant_values)

        given = dict(zip(bases, accumulators, strict=True))
        _, pullback = jax.vjp(forward, *(values[v] for v in wanted))
        cotangents = pullback([given[b].astype(b.aval.dtype) for b in computed])
        grads = dict(zip(wanted, cotangents, strict=True))
        for b in bases:
            if b in position:
                grads[b] = given[b] + grads[b].astype(given[b].dtype) if b in grads else given[b]
        order = sorted(grads, key=lambda v: position[v])
        return [grads[v].astype(accumulator_dtype(v.aval.dtype, grad_dtype)) for v in order]

    direct = {position[b] for b in bases if b in position}
    positions = sorted({position[v] for v in wanted} | direct)
    shapes = [
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        for avals in ([v.aval for v in params], [v.aval for v in constants], accumulator_avals)
    ]
    flat = flatten(jax.make_jaxpr(epilogue)(*shapes))
    eqns = prune(flat.eqns, flat.outvars)
    return close(flat.invars, eqns, flat.outvars, flat.constants), tuple(positions)


def _depends_on(eqns: Sequence[Equation], sources: set[Var], wanted: Sequence[Var]) -> set[Var]:
    """Those of ``sources`` that the ``wanted`` variables depend on."""
    needed = {v for e in prune(eqns, wanted) for v in e.invars if is_var(v)} | set(wanted)
    return sources & needed
