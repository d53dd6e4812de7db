"""When are two straight-line programs the same? Fingerprints that ignore the names of variables.

Equal stages (the middle blocks of a decoder) are differentiated, lowered and compiled once. Two
programs with equal fingerprints compute the same results from inputs in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxpipe.capture import _jax_compat as compat
from jaxpipe.capture._jax_compat import Atom, Equation, Var
from jaxpipe.capture.flat import is_var


def fingerprint(
    inputs: Sequence[Var], eqns: Sequence[Equation], outvars: Sequence[Atom]
) -> Hashable:
    """A hashable value that is equal for programs that are equal up to names of variables."""
    number: dict[Var, int] = {}
    for v in inputs:
        number.setdefault(v, len(number))
    head = tuple(_aval(v.aval) for v in inputs)
    body = []
    for eqn in eqns:
        reads = tuple(_atom(a, number) for a in eqn.invars)
        for v in eqn.outvars:
            number[v] = len(number)
        body.append(
            (
                eqn.primitive,
                reads,
                tuple(_aval(v.aval) for v in eqn.outvars),
                tuple((k, _param(p)) for k, p in sorted(eqn.params.items())),
                compat.context_key(eqn),
            )
        )
    return head, tuple(body), tuple(_atom(a, number) for a in outvars)


def _aval(aval: Any) -> Hashable:
    return getattr(aval, "shape", None), str(getattr(aval, "dtype", aval))


def _atom(atom: Atom, number: dict[Var, int]) -> Hashable:
    if is_var(atom):
        return number[atom]
    return "literal", _array(atom.val), _aval(atom.aval)


def _array(value: Any) -> Hashable:
    array = np.asarray(value)
    return array.shape, str(array.dtype), array.tobytes()


def _param(value: Any) -> Hashable:
    if hasattr(value, "eqns"):  # a jaxpr, open or closed
        jaxpr, consts = compat.parts(value)
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        return fingerprint(inputs, jaxpr.eqns, jaxpr.outvars), tuple(map(id, consts))
    if isinstance(value, dict):
        return tuple((str(k), _param(v)) for k, v in sorted(value.items(), key=lambda i: str(i[0])))
    if isinstance(value, (tuple, list)):
        return tuple(_param(v) for v in value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(value)
    if isinstance(value, float):
        return "float", repr(value)  # NaN equals NaN here
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value
