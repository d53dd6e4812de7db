"""The options of a pipelined function, as frozen data, each looked at when it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe._integers import integer
from jaxpipe.errors import PipelineError
from jaxpipe.scheduling import Schedule

_CHOICES = {
    "reduce": ("mean", "sum", "weighted", "concat"),
    "accumulate": ("index", "arrival"),
}
_LATER = {"dispatch": ("fixed", ("ready",)), "transport": ("auto", ("permute", "pull"))}
_RESIDUALS = ("min_cut", "vjp", "recompute")


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """What `jaxpipe.pipeline` takes beside the function; see there.

    Raises `PipelineError` for a value that no option takes, and for what is not there yet. Integers
    may be NumPy's, and lists any iterable: they are kept as int and tuple.
    """

    schedule: str | Schedule | Callable[..., Schedule]
    microbatches: int
    mesh: Mesh | None = None
    axis: str = "pipe"
    stages: Sequence[int] | None = None
    microbatch_axes: Any = 0
    reduce: str = "mean"
    out_axes: Any = 0
    has_aux: bool = False
    has_state: bool = False
    param_specs: Any = None
    grad_dtype: Any = None
    residuals: str | Sequence[str] = "min_cut"
    dispatch: str = "fixed"
    accumulate: str = "index"
    transport: str = "auto"
    memory_limit: float | None = None
    donate: bool = True

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)
        self._keep("microbatches", _count("microbatches", self.microbatches))
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise PipelineError(f"mesh must be a jax.sharding.Mesh or None, not {self.mesh!r}.")
        if not isinstance(self.axis, str):
            raise PipelineError(f"axis is the name of a mesh axis, not {self.axis!r}.")
        self._check_stages()
        for name in ("has_aux", "has_state", "donate"):
            if not isinstance(getattr(self, name), bool):
                raise PipelineError(f"{name} is True or False, not {getattr(self, name)!r}.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise PipelineError(
                    f"{name}={getattr(self, name)!r}: choose one of {_list(choices)}."
                )
        self._check_later()
        self._check_grad_dtype()
        self._check_residuals()
        self._check_memory_limit()

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_stages(self) -> None:
        if self.stages is None:
            return
        counts = _items(self.stages)
        numbers = [integer(count) for count in counts or ()]
        if not numbers or any(number is None or number < 1 for number in numbers):
            shown = self.stages if counts is None else counts
            raise PipelineError(
                f"stages={shown!r}: give the number of segments of each stage, a list of "
                "positive integers such as [3, 2, 2, 1], or None to let the schedule say how many "
                "stages it wants."
            )
        self._keep("stages", tuple(numbers))

    def _check_memory_limit(self) -> None:
        limit = self.memory_limit
        if limit is None:
            return
        if isinstance(limit, bool) or not hasattr(limit, "__float__") or not float(limit) > 0:
            raise PipelineError(
                f"memory_limit is a positive number of bytes per device, not {limit!r}."
            )
        self._keep("memory_limit", float(limit) if math.isfinite(limit) else None)

    def _check_later(self) -> None:
        if self.has_state:
            raise PipelineError(
                "has_state=True is not there yet: models with mutable state (batch statistics) "
                "cannot be pipelined by this version. Freeze the state, or pass it in the batch "
                "with microbatch_axes None."
            )
        for name, (now, later) in _LATER.items():
            given = getattr(self, name)
            if given in later:
                raise PipelineError(f"{name}={given!r} is not there yet; use {name}={now!r}.")
            allowed = (now, "device_put") if name == "transport" else (now,)
            if given not in allowed:
                raise PipelineError(f"{name}={given!r}: choose one of {_list(allowed)}.")

    def _check_grad_dtype(self) -> None:
        if self.grad_dtype is None:
            return
        try:
            dtype = jnp.dtype(self.grad_dtype)
        except TypeError:
            dtype = None
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise PipelineError(
                f"grad_dtype={self.grad_dtype!r} is no floating dtype; give one such as "
                "jnp.float32, or None to accumulate in each parameter's own."
            )

    def _check_residuals(self) -> None:
        given = [self.residuals] if isinstance(self.residuals, str) else _items(self.residuals)
        if given is None:
            raise PipelineError(
                f"residuals={self.residuals!r}: give one of {_list(_RESIDUALS)}, or a list with "
                "one for each stage."
            )
        for mode in given:
            if mode not in _RESIDUALS:
                raise PipelineError(
                    f"residuals={self.residuals!r}: {mode!r} is none of {_list(_RESIDUALS)}; give "
                    "one of them, or a list with one for each stage."
                )
        if not isinstance(self.residuals, str):
            self._keep("residuals", tuple(given))


def check_names(given: dict[str, Any]) -> None:
    """Raise `PipelineError` for a keyword that is no option, with the nearest one."""
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]}?" if close else f"options are {', '.join(known)}."
            raise PipelineError(f"there is no option {name!r}; {advice}")


def _check_schedule(schedule: Any) -> None:
    if not isinstance(schedule, str | Schedule | partial) and not callable(schedule):
        raise PipelineError(
            f"schedule={schedule!r}: give the name of a schedule, such as '1f1b' or "
            "'interleaved(chunks=4)', a schedule function, or a Schedule."
        )


def _count(name: str, number: Any) -> int:
    count = integer(number)
    if count is None or count < 1:
        raise PipelineError(f"{name} must be a positive integer, not {number!r}.")
    return count


def _items(given: Any) -> list[Any] | None:
    """What is in a list, tuple, array or other iterable, None if it is none."""
    if isinstance(given, str | bytes | dict) or not isinstance(given, Iterable):
        return None
    try:
        return list(given)
    except TypeError:  # an array of no dimensions
        return None


def _list(choices: Sequence[str]) -> str:
    return ", ".join(map(repr, choices))


def config_key() -> tuple[Any, ...]:
    """JAX's configuration, contexts of this thread included, as far as programs depend on it."""
    return tuple(str(getattr(jax.config, name, None)) for name in _CONFIG)


_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_softmax_custom_jvp",
    "jax_random_seed_offset",
    "jax_default_dtype_bits",
    "jax_enable_checks",
)
