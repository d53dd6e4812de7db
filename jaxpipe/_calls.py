"""How a user's loss function is called, and what it returns.

A call ``loss_fn(params, *args, rng=key, **kwargs)`` is split into parameters, the *batch* (the pair
``(args, kwargs)``) and the key. The function's results are read once, from their shapes: which is
the loss, which the weight, which aux; how each is joined over microbatches (its *rule*), and which
is differentiated with what seed. This file knows no stages and no devices.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._integers import integer
from jaxpipe._options import Options
from jaxpipe.capture._jax_compat import is_tracing
from jaxpipe.errors import PipelineError
from jaxpipe.lower.microbatch import Axes, Rule, microbatch_shape, resolve_axes


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, flat. ``batch``: leaves of ``(args, kwargs)``, then the key."""

    params: list[Any]
    params_tree: Any
    batch: list[Any]
    batch_tree: Any
    has_key: bool

    @property
    def unflat_params(self) -> Any:
        return jax.tree.unflatten(self.params_tree, self.params)

    @property
    def unflat_batch(self) -> Any:
        leaves = self.batch[:-1] if self.has_key else self.batch
        return jax.tree.unflatten(self.batch_tree, leaves)

    @property
    def key(self) -> Any:
        return self.batch[-1] if self.has_key else None

    def signature(self) -> tuple[Any, ...]:
        """Structures, shapes, dtypes and weak types: what a compiled pipeline depends on."""
        kinds = tuple(map(_kind, self.params)), tuple(map(_kind, self.batch))
        return (self.params_tree, self.batch_tree, self.has_key, *kinds)


def read_call(
    params: Any, args: tuple, kwargs: Mapping[str, Any], rng: Any, *, shapes: bool = False
) -> Call:
    """Flatten the arguments of a call; refuse what cannot be used, in a sentence each.

    ``shapes``: whether leaves may be `jax.ShapeDtypeStruct`.
    """
    _refuse_nnx(params)
    leaves, tree = jax.tree.flatten(params)
    batch, batch_tree = jax.tree.flatten((args, dict(kwargs)))
    if rng is not None:
        batch.append(_valid_key(rng))
    refuse_tracing((leaves, batch))
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise PipelineError(
            "jax_disable_jit is on, but a pipeline is made of compiled programs. To run the "
            "function op by op call .reference instead, or turn jax_disable_jit off."
        )
    given = {
        "params": params,
        "batch": args[0] if len(args) == 1 and not kwargs else (args, kwargs),
    }
    for name, each in given.items():
        refuse_deleted(name, each)
        if not shapes:
            refuse_shapes(name, each)
    return Call(leaves, tree, batch, batch_tree, rng is not None)


def refuse_tracing(tree: Any = None) -> None:
    """Raise `PipelineError` inside a transformation, and for leaves of ``tree`` that it traces."""
    leaves = jax.tree.leaves(tree)
    if is_tracing() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise PipelineError(
            "a pipelined function was called with traced values, inside jax.jit, jax.grad, "
            "jax.vmap or another transformation. A pipeline is not one XLA program: call it "
            "outside. For gradients use .value_and_grad, for training .train_step, and to "
            "compose the function with transformations .reference."
        )


def refuse_deleted(name: str, tree: Any, advice: str = "") -> None:
    """Raise `PipelineError` for the first array of ``tree`` whose buffer is gone, with its path."""
    path = _first(tree, lambda leaf: isinstance(leaf, jax.Array) and leaf.is_deleted())
    if path is not None:
        raise PipelineError(
            f"{name}{path} has been deleted: its buffer was donated to an earlier computation, or "
            f"freed with .delete().{advice}"
        )


def refuse_shapes(name: str, tree: Any) -> None:
    """Raise `PipelineError` for the first leaf of ``tree`` that is a shape alone, with its path."""
    path = _first(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    if path is not None:
        raise PipelineError(
            f"{name}{path} is a jax.ShapeDtypeStruct: with shapes alone a pipeline can be lowered "
            "(.lower), not run. Pass arrays."
        )


def _first(tree: Any, test: Callable[[Any], bool]) -> str | None:
    """The path of the first leaf that passes ``test``."""
    if not any(map(test, jax.tree.leaves(tree))):
        return None
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return next(jax.tree_util.keystr(path) for path, leaf in leaves if test(leaf))


def struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of a leaf; where it is does not matter."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        try:
            leaf = jax.typeof(leaf)
        except TypeError as error:
            raise PipelineError(
                f"an argument has a leaf of type {type(leaf).__name__}, {reprlib.repr(leaf)}, "
                "which is no array. Pass arrays and numbers; close over anything else."
            ) from error
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=_weak(leaf))


def _weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))  # key arrays have none


def _kind(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, jax.Array):
        leaf = struct(leaf)
    return leaf.shape, leaf.dtype, _weak(leaf)


def _refuse_nnx(params: Any) -> None:
    if any(c.__module__.startswith("flax.nnx") for c in type(params).__mro__):
        raise PipelineError(
            f"the first argument is a flax nnx object ({type(params).__name__}); pipelining nnx "
            "modules is not there yet. Split it with nnx.split and pass the nnx.Param state as "
            "plain arrays (nnx.to_pure_dict), merging inside the function."
        )


def _valid_key(rng: Any) -> Any:
    aval = struct(rng)
    typed = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    if typed and aval.shape == ():
        return rng
    if aval.dtype == jnp.uint32 and aval.shape in ((2,), (4,)):  # raw keys: threefry's, rbg's
        return rng
    raise PipelineError(
        f"rng must be one key, made by jax.random.key(seed); this has dtype {aval.dtype} and "
        f"shape {aval.shape}."
    )


def batch_axes(options: Options, call: Call) -> Axes:
    """The microbatch axis of every batch leaf of a call."""
    args, kwargs = call.unflat_batch
    axes = options.microbatch_axes
    if len(args) == 1 and not kwargs:
        return resolve_axes(axes, args[0], options.microbatches)
    if not args and kwargs and isinstance(axes, Mapping):
        return resolve_axes(axes, kwargs, options.microbatches)
    if axes is None or integer(axes) is not None:
        return resolve_axes(axes, (args, kwargs), options.microbatches)
    return resolve_axes((axes, 0), (args, kwargs), options.microbatches)


def microbatch_structs(call: Call, axes: Axes, microbatches: int) -> tuple[Any, ...]:
    """The arguments of the function for one microbatch, abstractly: (params, batch[, key])."""
    params = jax.tree.unflatten(call.params_tree, list(map(struct, call.params)))
    leaves = [
        microbatch_shape(struct(leaf), axis, microbatches)
        for leaf, axis in zip(call.batch, axes, strict=False)  # the key comes last, without axis
    ]
    batch = jax.tree.unflatten(call.batch_tree, leaves)
    return (params, batch, struct(call.key)) if call.has_key else (params, batch)


def flat_function(fun: Callable, has_key: bool) -> Callable:
    """``fun`` as a function of (params, (args, kwargs)[, key])."""
    if not has_key:
        return lambda params, batch: fun(params, *batch[0], **batch[1])
    try:
        by_name = "rng" in inspect.signature(fun).parameters
    except (TypeError, ValueError):
        by_name = False
    if by_name:
        return lambda params, batch, key: fun(params, *batch[0], **batch[1], rng=key)
    return lambda params, batch, key: fun(params, *batch[0], key, **batch[1])


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the function returns, read by ``reduce`` and ``has_aux``.

    ``rules``: how each flat output is joined over microbatches. ``seeds``: the cotangents of those
    that are differentiated. ``weighted``: output 0 is a sum of losses and output 1 their weight.
    """

    tree: Any
    rules: tuple[Rule, ...]
    seeds: dict[int, float]
    weighted: bool
    has_aux: bool

    def assemble(self, joined: Sequence[Any]) -> Any:
        """What the caller gets: the loss, ``(loss, aux)``, or for "concat" the joined outputs."""
        value = jax.tree.unflatten(self.tree, joined)
        if not self.weighted:
            return value
        (total, weight), aux = value if self.has_aux else (value, None)
        loss = total / weight
        return (loss, aux) if self.has_aux else loss


def read_outputs(options: Options, tree: Any, avals: Sequence[Any]) -> Outputs:
    """Check what the function returns, and say how it is joined and differentiated.

    Raises `PipelineError` with shapes and dtypes, and what to change.
    """
    value = jax.tree.unflatten(tree, avals)
    main, aux = _split_aux(options, value)
    stacked = ["stack"] * len(jax.tree.leaves(aux))
    if options.reduce == "concat":
        rules = [*_concat_rules(options.out_axes, main), *stacked]
        return Outputs(tree, tuple(rules), {}, False, options.has_aux)
    if options.reduce == "weighted":
        _check_weighted(main)
        return Outputs(tree, ("sum", "sum", *stacked), {0: 1.0}, True, options.has_aux)
    _check_loss("the loss", main, options)
    seed = 1.0 / options.microbatches if options.reduce == "mean" else 1.0
    return Outputs(tree, (options.reduce, *stacked), {0: seed}, False, options.has_aux)


def _split_aux(options: Options, value: Any) -> tuple[Any, Any]:
    if not options.has_aux:
        return value, None
    if not isinstance(value, tuple) or len(value) != 2:
        raise PipelineError(
            f"with has_aux=True the function must return a pair (loss, aux); it returns "
            f"{_show(value)}. Return a pair, or leave has_aux out."
        )
    return value


def _check_weighted(main: Any) -> None:
    if not isinstance(main, tuple) or len(main) != 2:
        raise PipelineError(
            'with reduce="weighted" the function must return (loss_sum, weight), or '
            f"((loss_sum, weight), aux) with has_aux=True; it returns {_show(main)}."
        )
    _check_loss("loss_sum", main[0], None)
    weight = main[1]
    if not _is_leaf(weight) or weight.shape != ():
        raise PipelineError(
            f"the weight must be a scalar, such as mask.sum(); it is {_show(weight)}."
        )


def _check_loss(what: str, loss: Any, options: Options | None) -> None:
    if not _is_leaf(loss):
        hint = ""
        if isinstance(loss, tuple) and len(loss) == 2 and options and not options.has_aux:
            hint = " To return (loss, aux), give has_aux=True."
            if all(_is_leaf(each) and each.shape == () for each in loss):
                hint += ' To return (loss_sum, weight), give reduce="weighted".'
        raise PipelineError(
            f"{what} must be one scalar; the function returns {_show(loss)}.{hint} To join the "
            'outputs of microbatches without a loss, give reduce="concat".'
        )
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        change = "take its .mean()" if loss.shape else "convert it to a floating dtype"
        raise PipelineError(
            f"{what} must be a floating scalar to be differentiated, but the function returns "
            f"dtype {loss.dtype} and shape {loss.shape}; {change}, or for outputs without a loss "
            'give reduce="concat".'
        )


def _concat_rules(out_axes: Any, main: Any) -> list[Rule]:
    axes: list[Any] = []

    def broadcast(axis: Any, subtree: Any) -> None:
        axes.extend([axis] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(broadcast, out_axes, main, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise PipelineError(
            f"out_axes={out_axes!r} is no prefix of what the function returns, {_show(main)}."
        ) from error
    rules: list[Rule] = []
    for (path, leaf), axis in zip(jax.tree_util.tree_leaves_with_path(main), axes, strict=True):
        position = integer(axis)
        if position is None or not -leaf.ndim <= position < leaf.ndim:
            raise PipelineError(
                f"output{jax.tree_util.keystr(path)} has shape {leaf.shape} and cannot be joined "
                f"along axis {axis!r}; give another axis in out_axes, or a loss with "
                'reduce="mean" or "sum".'
            )
        rules.append(("concat", position % leaf.ndim))
    return rules


def _is_leaf(value: Any) -> bool:
    return jax.tree_util.all_leaves([value])


def _show(value: Any) -> str:
    leaves = jax.tree.leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return f"{value.dtype}{list(value.shape)}"
    shown = jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", value)
    text = repr(shown).replace("'", "")
    return text if len(text) < 200 else text[:197] + "..."
