"""`Flat`: a straight-line program, and the small passes over it that all of capture shares.

A `Flat` is what is left of a jaxpr when nested calls are inlined: input variables, equations in
order, output atoms, and constants. Passes are functions ``Flat -> Flat`` (`inline`, `prune`) or
make a closed jaxpr of one (`close`). Nothing here knows of boundaries, stages or derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import primitives as prims

from jaxpipe.capture import _jax_compat as compat
from jaxpipe.capture._jax_compat import Atom, Equation, Var

Inline = Callable[[Equation], bool]


@dataclass(frozen=True)
class Flat:
    """Input variables, equations, output atoms; ``constants`` maps variables to arrays."""

    invars: tuple[Var, ...]
    eqns: tuple[Equation, ...]
    outvars: tuple[Atom, ...]
    constants: dict[Var, Any]


def is_var(atom: Atom) -> bool:
    return not compat.is_literal(atom)


def call_jaxpr(eqn: Equation) -> Any | None:
    """The jaxpr of an equation that merely calls one (jit, closed_call, custom_jvp), or None."""
    if eqn.primitive in (prims.jit_p, prims.closed_call_p):
        return eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
    if eqn.primitive is prims.custom_jvp_call_p:
        return eqn.params["call_jaxpr"]
    return None


def is_plain_call(eqn: Equation) -> bool:
    return eqn.primitive in (prims.jit_p, prims.closed_call_p)


def flatten(closed: Any, expand: Callable[[Equation, list[Atom]], Any] | None = None) -> Flat:
    """Inline every nested call of a closed jaxpr.

    ``expand(eqn, inputs)`` may return ``(jaxpr, inputs, equations)`` to have an equation replaced
    by ``equations`` and then ``jaxpr`` applied to ``inputs``; by default plain calls are inlined.
    """
    jaxpr, consts = compat.parts(closed)
    constants: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    out: list[Equation] = []
    fresh = _FreshConstants(constants)

    def walk(jaxpr: Any, env: dict[Var, Atom], site: Equation | None) -> None:
        for eqn in jaxpr.eqns:
            inputs = [_read(env, a) for a in eqn.invars]
            call = expand(eqn, inputs) if expand else None
            if call is None and is_plain_call(eqn):
                call = (call_jaxpr(eqn), inputs, ())
            if call is not None:
                body, args, before = call
                out.extend(before)
                body, body_consts = compat.parts(body)
                inner: dict[Var, Atom] = dict(zip(body.invars, args, strict=True))
                inner.update(
                    (v, fresh(c)) for v, c in zip(body.constvars, body_consts, strict=True)
                )
                walk(body, inner, eqn if site is None else site)
                for v, a in zip(eqn.outvars, body.outvars, strict=True):
                    env[v] = _read(inner, a)
                continue
            if site is None:
                out.append(eqn.replace(invars=inputs))
                continue
            # The same jaxpr may be called twice: its variables must be new each time.
            new_out = [v if compat.is_drop(v) else compat.new_var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, new_out, strict=True))
            source = eqn if compat.has_source(eqn) else site
            out.append(eqn.replace(invars=inputs, outvars=new_out, source_info=source.source_info))

    env: dict[Var, Atom] = {}
    walk(jaxpr, env, None)
    return Flat(
        tuple(jaxpr.invars), tuple(out), tuple(_read(env, a) for a in jaxpr.outvars), constants
    )


class _FreshConstants:
    """Gives one variable to each constant array, by identity."""

    def __init__(self, constants: dict[Var, Any]):
        self.constants = constants
        self.seen = {id(c): v for v, c in constants.items()}

    def __call__(self, array: Any) -> Var:
        if id(array) not in self.seen:
            var = compat.new_var(jax.core.ShapedArray(array.shape, array.dtype))
            self.seen[id(array)] = var
            self.constants[var] = array
        return self.seen[id(array)]


def _read(env: dict[Var, Atom], atom: Atom) -> Atom:
    return env.get(atom, atom) if is_var(atom) else atom


def prune(eqns: Sequence[Equation], wanted: Iterable[Atom]) -> list[Equation]:
    """The equations that ``wanted`` depends on, in order; equations with effects always stay."""
    needed = {a for a in wanted if is_var(a)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            needed.update(a for a in eqn.invars if is_var(a))
            kept.append(eqn)
    return kept[::-1]


def free_variables(eqns: Sequence[Equation], outvars: Iterable[Atom] = ()) -> list[Var]:
    """Variables read but not made by the equations (nor by themselves), in order of first use."""
    made: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        for a in eqn.invars:
            if is_var(a) and a not in made:
                free[a] = None
        made.update(eqn.outvars)
    for a in outvars:
        if is_var(a) and a not in made:
            free[a] = None
    return list(free)


def substitute(eqns: Iterable[Equation], env: dict[Var, Atom]) -> list[Equation]:
    """Replace variables that equations read."""
    return [
        e.replace(invars=[_read(env, a) for a in e.invars])
        if any(is_var(a) and a in env for a in e.invars)
        else e
        for e in eqns
    ]


def close(
    invars: Sequence[Var],
    eqns: Sequence[Equation],
    outvars: Sequence[Atom],
    constants: Mapping[Var, Any] | None = None,
) -> Any:
    """A closed jaxpr whose results are all buffers of its own.

    A result that is an argument, a literal, or a repeated result is copied, so that every result
    has memory of its own and may be freed or donated by itself. ``constants``: arrays that it may
    close over.
    """
    known = constants or {}
    held = {v: known[v] for v in free_variables(eqns, outvars) if v in known}
    eqns = list(eqns)
    taken = {*invars, *held}
    results: list[Atom] = []
    for atom in outvars:
        if is_var(atom) and atom not in taken:
            taken.add(atom)
            results.append(atom)
        else:
            copy = compat.new_equation(prims.copy_p, [atom], {}, atom.aval)
            eqns.append(copy)
            results.append(copy.outvars[0])
    return compat.closed_jaxpr(invars, eqns, results, held)


def nbytes(aval: Any) -> int:
    """Bytes of one array; keys count by their itemsize."""
    size = 1
    for d in aval.shape:
        size *= d
    return int(size * aval.dtype.itemsize)


def sub_jaxprs(eqn: Equation) -> list[Any]:
    return [compat.parts(j)[0] for j in jex.jaxprs_in_params(eqn.params)]
