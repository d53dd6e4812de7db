"""Differentiate: one stage's forward program -> its *joint* program.

The joint program takes the stage's inputs and the cotangents of its outputs, and gives outputs and
gradients: what `jax.vjp` makes, in one straight line, so that a later pass can split it into F, B,
I and W. What depends on no cotangent belongs to the forward.

A `jax.checkpoint` of the user stays a recomputation: its inputs pass through a *gate*, an identity
that reads a cotangent, so that the recomputed values belong to the backward and are neither saved
nor merged with the forward's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import primitives as prims

from jaxpipe.capture import _jax_compat as compat
from jaxpipe.capture._jax_compat import Atom, Equation, Var
from jaxpipe.capture.flat import Flat, call_jaxpr, flatten, is_var

gate_p = jex.Primitive("recompute_gate")


@gate_p.def_abstract_eval
def _gate_abstract_eval(x, _cotangent):
    return x


@dataclass(frozen=True)
class Body:
    """A stage's forward program without its prologue; ``outs`` are what it sends, then outputs."""

    residents: tuple[Var, ...]
    batch: tuple[Var, ...]
    edges: tuple[Var, ...]
    eqns: tuple[Equation, ...]
    outs: tuple[Atom, ...]


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a `Body` in one straight line.

    ``cotangents``: variables, keyed by (position in outs, which of the readers). ``resident_grads``
    and ``edge_grads``: by position, without those that are zero whatever the cotangents.
    ``backward``: variables that depend on a cotangent.
    """

    residents: tuple[Var, ...]
    batch: tuple[Var, ...]
    edges: tuple[Var, ...]
    eqns: tuple[Equation, ...]
    constants: dict[Var, Any]
    outs: tuple[Atom, ...]
    cotangents: dict[tuple[int, int], Var]
    resident_grads: dict[int, Atom]
    edge_grads: dict[int, Atom]
    backward: frozenset[Var]


def differentiate(
    body: Body,
    *,
    residents: Sequence[int],
    edges: Sequence[int],
    readers: Sequence[int],
    seeds: dict[int, float],
) -> Joint:
    """Make the joint program of a stage.

    Args:
      body: the forward program.
      residents, edges: positions to differentiate with respect to.
      readers: for each out, how many cotangents arrive for it (from that many later stages).
      seeds: cotangents that are known numbers, by position in outs (the loss).
    """
    inputs = [*body.residents, *body.batch, *body.edges]
    forward = jex.jaxpr_as_fun(compat.closed_jaxpr(inputs, body.eqns, body.outs))
    num_residents, num_batch = len(body.residents), len(body.batch)
    chosen = [*residents, *(num_residents + num_batch + e for e in edges)]
    slots = [(k, j) for k, n in enumerate(readers) for j in range(n)]
    slots += [(k, readers[k]) for k in seeds]
    live = sorted({k for k, _ in slots})

    def joint(values, cotangents):
        def run(*diff):
            now = list(values)
            for i, x in zip(chosen, diff, strict=True):
                now[i] = x
            outs = forward(*now)
            return [outs[k] for k in live], outs

        _, pullback, outs = jax.vjp(run, *(values[i] for i in chosen), has_aux=True)
        total: dict[int, Any] = {}
        for (k, _), ct in zip(slots, cotangents, strict=True):
            total[k] = total[k] + ct if k in total else ct
        return outs, pullback([total[k] for k in live]) if live else ()

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
    ct_shapes = [
        jax.ShapeDtypeStruct(body.outs[k].aval.shape, body.outs[k].aval.dtype) for k, _ in slots
    ]
    flat = flatten(jax.make_jaxpr(joint)(shapes, ct_shapes))
    n = len(inputs)
    flat, backward = _open_checkpoints(flat, flat.invars[n:])
    cotangents = dict(zip(slots, flat.invars[n:], strict=True))
    outs, grads = flat.outvars[: len(body.outs)], flat.outvars[len(body.outs) :]
    grads = grads if live else ()
    nonzero = {i: g for i, g in zip(chosen, grads, strict=False) if is_var(g) and g in backward}
    offset = num_residents + num_batch
    return Joint(
        residents=flat.invars[:num_residents],
        batch=flat.invars[num_residents:offset],
        edges=flat.invars[offset:n],
        eqns=flat.eqns,
        constants=flat.constants,
        outs=outs,
        cotangents=cotangents,
        resident_grads={i: g for i, g in nonzero.items() if i < num_residents},
        edge_grads={i - offset: g for i, g in nonzero.items() if i >= offset},
        backward=frozenset(backward),
    )


def _open_checkpoints(flat: Flat, cotangents: Sequence[Var]) -> tuple[Flat, set[Var]]:
    """Inline checkpoints (behind gates if they recompute for a backward) and custom_jvp calls."""
    backward = set(cotangents)
    constants = dict(flat.constants)
    out: list[Equation] = []

    def emit(eqn: Equation) -> None:
        if any(is_var(a) and a in backward for a in eqn.invars):
            backward.update(eqn.outvars)
        out.append(eqn)

    def walk(eqns: Sequence[Equation], env: dict[Var, Atom], renew: bool) -> None:
        for eqn in eqns:
            inputs = [env.get(a, a) if is_var(a) else a for a in eqn.invars]
            if eqn.primitive is prims.remat_p:
                body: Any = eqn.params["jaxpr"]
                ct = next((a for a in inputs if is_var(a) and a in backward), None)
                if ct is not None:
                    inputs = [_gate(a, ct, emit) if a not in backward else a for a in inputs]
            elif eqn.primitive is prims.custom_jvp_call_p:
                body = call_jaxpr(eqn)
            else:
                outs = list(eqn.outvars)
                if renew:
                    outs = [v if compat.is_drop(v) else compat.new_var(v.aval) for v in outs]
                    env.update(zip(eqn.outvars, outs, strict=True))
                emit(eqn.replace(invars=inputs, outvars=outs))
                continue
            inner = flatten(_closed(body))
            constants.update(inner.constants)
            local: dict[Var, Atom] = dict(zip(inner.invars, inputs, strict=True))
            walk(inner.eqns, local, True)
            for v, a in zip(eqn.outvars, inner.outvars, strict=True):
                env[v] = local.get(a, a) if is_var(a) else a

    env: dict[Var, Atom] = {}
    walk(flat.eqns, env, False)
    outvars = tuple(env.get(a, a) if is_var(a) else a for a in flat.outvars)
    return Flat(flat.invars, tuple(out), outvars, constants), backward


def _gate(atom: Atom, ct: Var, emit: Any) -> Atom:
    if not is_var(atom):
        return atom
    eqn = compat.new_equation(gate_p, [atom, ct], {}, atom.aval)
    emit(eqn)
    return eqn.outvars[0]


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())
