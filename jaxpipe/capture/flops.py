"""Floating point operations of equations, counted from shapes.

Matrix products and convolutions count two operations per multiply-add; everything else counts one
per element written (reductions: per element read). The figures are for comparing stages with one
another, not for predicting seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from jax.extend.core import primitives as prims

from jaxpipe.capture._jax_compat import Equation
from jaxpipe.capture.flat import sub_jaxprs


def flops(eqns: Iterable[Equation]) -> float:
    """The operations of a list of equations, nested jaxprs included."""
    return float(sum(_equation_flops(e) for e in eqns))


def _size(var) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _equation_flops(eqn: Equation) -> float:
    if eqn.primitive is prims.dot_general_p:
        (contract, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contract)
        return 2.0 * depth * _size(eqn.outvars[0])
    if eqn.primitive is prims.conv_general_dilated_p:
        numbers = eqn.params["dimension_numbers"]
        kernel = eqn.invars[1].aval.shape
        depth = math.prod(kernel) / max(1, kernel[numbers.rhs_spec[0]])
        return 2.0 * depth * _size(eqn.outvars[0])
    bodies = sub_jaxprs(eqn)
    if bodies:
        inner = [flops(b.eqns) for b in bodies]
        if eqn.primitive is prims.scan_p:
            return eqn.params["length"] * sum(inner)
        return max(inner) if eqn.primitive is prims.cond_p else sum(inner)
    if eqn.primitive.name.startswith("reduce_"):
        return float(sum(_size(v) for v in eqn.invars))
    return float(sum(_size(v) for v in eqn.outvars))
