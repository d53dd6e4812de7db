"""Which values to save for a backward pass, and which to recompute: min-cut on bytes.

Separate F and B programs cannot share XLA's fusions, so what is passed between them is chosen
here: every value that the backward reads is either saved, or recomputed from saved ones by cheap
equations. The set with the fewest bytes is a minimum vertex cut of the graph of values (the idea
of min-cut rematerialisation, as in functorch's partitioner for PyTorch; max-flow by networkx).

Never may one side of an equality be saved and the other recomputed: with a row maximum saved and
its operand recomputed, ``x == max`` misses by rounding and the row loses its gradient. So float
comparisons for equality are never recomputed; their (boolean) results or what follows are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import networkx as nx
from jax.extend.core import primitives as prims

from jaxpipe.capture._jax_compat import Equation, Var
from jaxpipe.capture.flat import is_var, nbytes

# Elementwise work, layout changes, broadcasts and reductions, by primitive name.
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    complex conj convert_element_type copy cos cosh digamma div erf erf_inv erfc exp exp2 expm1
    floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not or polynomial pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor eq
    log2 one_minus_square population_count clz stop_gradient
"""
_LAYOUT = """
    broadcast_in_dim concatenate dynamic_slice expand_dims iota pad reshape rev slice split squeeze
    transpose empty2
"""
_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"
_CHEAP = frozenset((_ELEMENTWISE + _LAYOUT + _REDUCTIONS).split())

LAYOUT = frozenset(["broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev"])

# Each saved array costs a little beside its bytes: a longer argument list at every call.
_PER_ARRAY = 64


def is_cheap(eqn: Equation) -> bool:
    """Whether an equation may be run again in the backward rather than its result be saved."""
    if eqn.effects or eqn.primitive.name not in _CHEAP:
        return False
    if eqn.primitive in (prims.eq_p, prims.ne_p):
        a, b = eqn.invars
        both = is_var(a) and is_var(b)
        return not (both and jnp.issubdtype(a.aval.dtype, jnp.inexact))
    return True


@dataclass(frozen=True)
class Choice:
    """Rules of one cut: what may be saved, what may be recomputed, what is there for nothing.

    ``free(var)``: available to the backward anyway (parameters, batch leaves).
    ``given(var)``: an input that exists before any equation, to be held at the cost of its bytes.
    ``savable(var)``: may be saved. ``recomputable(eqn)``: may be run again.
    """

    free: Callable[[Var], bool]
    given: Callable[[Var], bool]
    savable: Callable[[Var], bool]
    recomputable: Callable[[Equation], bool]


def min_cut(
    needed: Iterable[Var],
    maker: Mapping[Var, Equation],
    operands: Callable[[Equation], Sequence[Var]],
    choice: Choice,
) -> set[Var]:
    """The set of variables with the fewest bytes from which all of ``needed`` can be had.

    ``maker[v]`` is the equation that makes v; ``operands(eqn)`` the variables it really reads.
    """
    graph = nx.DiGraph()
    graph.add_node("source")
    graph.add_node("sink")
    todo = []
    seen = set()
    for v in needed:
        if not choice.free(v):
            graph.add_edge((v, "out"), "sink")
            todo.append(v)
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if choice.savable(v):
            graph.add_edge((v, "in"), (v, "out"), capacity=nbytes(v.aval) + _PER_ARRAY)
        else:
            graph.add_edge((v, "in"), (v, "out"))
        if choice.given(v) or not choice.recomputable(maker[v]):
            graph.add_edge("source", (v, "in"))
            continue
        for u in operands(maker[v]):
            if not choice.free(u):
                graph.add_edge((u, "out"), (v, "in"))
                todo.append(u)
    if not seen:
        return set()
    _, (reachable, _) = nx.minimum_cut(
        graph, "source", "sink", flow_func=nx.algorithms.flow.boykov_kolmogorov
    )
    return {v for v in seen if (v, "in") in reachable and (v, "out") not in reachable}
