"""The one file that touches private or version-dependent parts of JAX.

Everything else in jaxpipe uses public names. What is here: where an equation stands in the user's
source, the parts of a jaxpr (jax 0.12 merged `ClosedJaxpr` into `Jaxpr`), and building one.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import core as core_lib
from jax._src import effects as effects_lib
from jax._src import source_info_util

if TYPE_CHECKING:  # JAX's own types have avals without shape and dtype
    Var: TypeAlias = Any
    Literal: TypeAlias = Any
    Equation: TypeAlias = Any
    Atom: TypeAlias = Any
else:
    Var = jex.Var
    Literal = jex.Literal
    Equation = jex.JaxprEqn
    Atom = Any  # Var | Literal

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SITE = tuple({sysconfig.get_paths()[k] for k in ("purelib", "platlib", "stdlib")})


@functools.lru_cache(maxsize=4096)
def _is_model_file(path: str) -> bool:
    if path.startswith("<"):
        return False
    if path.startswith(_HERE):  # our own frames, but not models that ship with jaxpipe
        return os.path.relpath(path, _HERE).split(os.sep)[0] == "demo"
    return not path.startswith(_SITE)


def _frames(source_info: Any) -> Iterator[Any]:
    return source_info_util.user_frames(source_info.traceback)


def source_line(equation: Equation) -> str:
    """Where the user's own code made this equation: ``file:line (function)``, innermost frame.

    Frames of libraries (jax, flax, optax, jaxpipe) are passed over, unless there is nothing else.
    """
    first = None
    for frame in _frames(equation.source_info):
        text = f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        if _is_model_file(frame.file_name):
            return text
        first = first or text
    return first or "(unknown source line)"


def has_source(equation: Equation) -> bool:
    """Whether the equation carries a frame of the user's code."""
    return any(_is_model_file(f.file_name) for f in _frames(equation.source_info))


def source_position(equation: Equation) -> tuple[str, int] | None:
    """The (file, line) of `source_line`, or None where the user's code is not on the stack."""
    for frame in _frames(equation.source_info):
        if _is_model_file(frame.file_name):
            return frame.file_name, frame.start_line
    return None


def is_ordered(effect: Any) -> bool:
    return effects_lib.ordered_effects.contains(effect)


def is_tracing() -> bool:
    """Whether this thread is inside a transformation, so that operations are staged, not run."""
    return not core_lib.trace_state_clean()


def new_var(aval: Any) -> Var:
    return Var(aval)


def literal(value: Any, aval: Any) -> Literal:
    return Literal(np.asarray(value, aval.dtype), aval)


def is_literal(atom: Atom) -> bool:
    return isinstance(atom, jex.Literal)


def is_drop(var: Any) -> bool:
    return isinstance(var, jex.DropVar)


def parts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The open jaxpr and the constants of a closed or open jaxpr, in any JAX version."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, tuple(getattr(jaxpr, "consts", ()))


def closed_jaxpr(
    invars: Sequence[Var],
    eqns: Sequence[Equation],
    outvars: Sequence[Atom],
    constants: Mapping[Var, Any] | None = None,
) -> Any:
    """A closed jaxpr, over the arrays ``constants`` if there are any."""
    held = dict(constants or {})
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    like = _empty_jaxpr()
    debug = like.debug_info
    debug = debug._replace(
        arg_names=tuple(f"x{i}" for i in range(len(invars))),
        result_paths=tuple(f"y{i}" for i in range(len(outvars))),
    )
    jaxpr = jex.Jaxpr(list(held), list(invars), list(outvars), list(eqns), effects, debug)
    return jex.ClosedJaxpr(jaxpr, tuple(held.values()))


@functools.cache
def _empty_jaxpr() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr


def new_equation(primitive: Any, invars: Sequence[Atom], params: dict, out_aval: Any) -> Equation:
    """An equation with one fresh output variable."""
    out = new_var(out_aval)
    return jex.new_jaxpr_eqn(list(invars), [out], primitive, params, frozenset())


def context_key(equation: Equation) -> Any:
    """What an equation's context adds to its meaning, hashable."""
    ctx = equation.ctx
    return (
        getattr(ctx, "compute_type", None),
        str(getattr(ctx, "xla_metadata", None)),
        getattr(ctx, "threefry_partitionable", None),
    )


def cast(atom: Atom, dtype: Any) -> Equation:
    """An equation that converts ``atom`` to ``dtype``."""
    aval = jax.core.ShapedArray(atom.aval.shape, dtype)
    params = {"new_dtype": np.dtype(dtype), "weak_type": False, "sharding": None}
    return new_equation(jex.primitives.convert_element_type_p, [atom], params, aval)
