"""`pipeline`: a loss function and a schedule, made one pipelined function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxpipe._options import Options
from jaxpipe._pipelined import Pipelined
from jaxpipe.scheduling import Schedule

__all__ = ["Pipelined", "pipeline"]


def pipeline(
    fun: Callable | None = None,
    *,
    schedule: str | Schedule | Callable[..., Schedule],
    microbatches: int,
    mesh: Mesh | None = None,
    axis: str = "pipe",
    stages: Sequence[int] | None = None,
    microbatch_axes: Any = 0,
    reduce: str = "mean",
    out_axes: Any = 0,
    has_aux: bool = False,
    has_state: bool = False,
    param_specs: Any = None,
    grad_dtype: Any = None,
    residuals: str | Sequence[str] = "min_cut",
    dispatch: str = "fixed",
    accumulate: str = "index",
    transport: str = "auto",
    memory_limit: float | None = None,
    donate: bool = True,
) -> Any:
    """Pipeline a loss function ``fun(params, batch)``, marked with `stage_boundary`.

    As a decorator ``@jp.pipeline(schedule=..., microbatches=...)``, or as a function
    ``jp.pipeline(fun, schedule=..., microbatches=...)``. The result is called like ``fun`` itself
    (forward only); see `Pipelined` for ``value_and_grad``, ``train_step``, ``lower``, ``place``,
    ``gather``, ``init``, ``replace`` and ``reference``.

    Args:
      fun: ``fun(params, batch)`` (or further positional and keyword arguments, all of them batch),
        for one microbatch. Returns a scalar loss; see ``reduce`` and ``has_aux``. Takes ``rng``
        where calls give one.
      schedule: a name (``"1f1b"``), a name with options (``"interleaved(chunks=4)"``), a schedule
        function, or a `Schedule`.
      microbatches: M, how many contiguous blocks a batch is cut into.
      mesh: a mesh with the axis ``axis``; its other axes span each pipeline device. By default all
        devices on one axis. Its axes should be of type Auto.
      axis: the pipeline axis of the mesh.
      stages: how many segments each stage takes, as a list; by default balanced by FLOPs.
      microbatch_axes: a pytree prefix of the batch, as ``in_axes`` of `jax.vmap`: the axis that is
        cut, or None for a leaf that every microbatch gets whole. With several batch arguments: one
        entry for each positional one; keyword arguments are then cut along axis 0.
      reduce: ``"mean"`` of the microbatches' losses; ``"sum"``; ``"weighted"`` (``fun`` returns
        ``(loss_sum, weight)``, and loss and gradients are divided by the sum of weights once);
        ``"concat"`` (outputs joined along ``out_axes``, without gradients).
      out_axes: a pytree prefix of the outputs, for ``"concat"``.
      has_aux: ``fun`` returns ``(loss, aux)``; aux leaves gain a leading axis of length M.
      has_state: not there yet.
      param_specs: a pytree prefix of the parameters of `jax.sharding.PartitionSpec`, their layout
        within each device's submesh.
      grad_dtype: the dtype in which gradients are accumulated; by default each parameter's.
      residuals: what forwards save for backwards: ``"min_cut"`` (fewest bytes, cheap work is
        repeated), ``"vjp"`` (all that `jax.vjp` saves), ``"recompute"`` (only a stage's inputs),
        or a list with one for each stage.
      dispatch: ``"fixed"``: each device follows its order.
      accumulate: ``"index"`` adds gradients in microbatch order, ``"arrival"`` as they come.
      transport: ``"auto"``.
      memory_limit: bytes per chip that parameters, accumulators, values and temporaries may take;
        min-cut residuals are recomputed until it is kept, else `PipelineError`.
      donate: whether a training step takes over the buffers of the state it is given.

    Raises:
      PipelineError: for an option that makes no sense, and when called, for a model, batch or mesh
        that cannot be pipelined as asked.
      ScheduleError: when called, for a schedule that is wrong or does not fit the model.

    >>> import jax, jax.numpy as jnp, jaxpipe as jp
    >>> mesh = jax.make_mesh((1,), ("pipe",), devices=jax.devices()[:1])
    >>> @jp.pipeline(schedule="gpipe", microbatches=2, mesh=mesh)
    ... def loss_fn(params, batch):
    ...     return jnp.mean((batch @ params["w"]) ** 2)
    >>> loss, grads = loss_fn.value_and_grad({"w": jnp.ones(3)}, jnp.ones((4, 3)))
    >>> float(loss), grads["w"].tolist()
    (9.0, [6.0, 6.0, 6.0])
    """
    options = Options(
        schedule=schedule,
        microbatches=microbatches,
        mesh=mesh,
        axis=axis,
        stages=stages,
        microbatch_axes=microbatch_axes,
        reduce=reduce,
        out_axes=out_axes,
        has_aux=has_aux,
        has_state=has_state,
        param_specs=param_specs,
        grad_dtype=grad_dtype,
        residuals=residuals,
        dispatch=dispatch,
        accumulate=accumulate,
        transport=transport,
        memory_limit=memory_limit,
        donate=donate,
    )
    if fun is None:
        return lambda fun: Pipelined(fun, options)
    return Pipelined(fun, options)
