"""What `train_step` takes: an optax optimizer, or an update function of the user's own.

An optimizer is made an update function ``update(state, grads, loss) -> (state, metrics)`` on whole
trees. What cannot work is told before a step runs, or while its update is traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpipe.errors import PipelineError

if TYPE_CHECKING:
    from jaxpipe._train import TrainState


def check_update_function(update: Any) -> None:
    """Raise `PipelineError` unless ``update`` can be called with a state, gradients and aux."""
    wanted = "an optax optimizer or a function update(state, grads, aux) -> (state, metrics)"
    if not callable(update):
        raise PipelineError(f"train_step takes {wanted}, not {update!r}.")
    name = getattr(update, "__name__", repr(update))
    if str(getattr(update, "__module__", "")).split(".")[0] == "optax":
        raise PipelineError(
            f"train_step takes {wanted}, but {name} makes an optimizer; call it first, for "
            f"example optax.{name}(1e-3)."
        )
    try:
        inspect.signature(update).bind(None, None, None)
    except TypeError as error:
        raise PipelineError(
            f"train_step takes {wanted}, but {name} cannot be called with three arguments: {error}."
        ) from None
    except ValueError:  # a builtin without a signature
        return


def is_optimizer(update: Any) -> bool:
    """Whether it has the two functions of an optax transformation."""
    return callable(getattr(update, "init", None)) and callable(getattr(update, "update", None))


def update_of(optimizer: Any) -> Callable:
    """The update function of an optimizer, which gets the loss as ``value`` if it asks for it."""
    import optax

    takes_more = optax.with_extra_args_support(optimizer)  # such as the loss, as ``value``

    def update(state: TrainState, grads: Any, loss: Any) -> tuple[TrainState, dict[str, Any]]:
        given = grads, state.opt_state, state.params
        try:
            made = _with_value(takes_more, given, loss)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            _explain(error, optimizer, state)
            raise
        if not (isinstance(made, tuple) and len(made) == 2):
            raise PipelineError(
                f"the optimizer's update must return (updates, state), not {made!r}."
            )
        changes, opt_state = made
        structures: list[Any] = [jax.tree.structure(changes), jax.tree.structure(state.params)]
        if structures[0] != structures[1]:
            raise PipelineError(
                "the optimizer's updates have another structure than the parameters: "
                f"{structures[0]} instead of {structures[1]}."
            )
        params = optax.apply_updates(state.params, changes)
        new = replace(state, step=state.step + 1, params=params, opt_state=opt_state)
        return new, {"grad_norm": _norm(grads)}

    return update


def _with_value(optimizer: Any, given: tuple[Any, Any, Any], loss: Any) -> Any:
    try:
        return optimizer.update(*given, value=loss)
    except TypeError as error:  # some take extra arguments, and yet not this one
        if "unexpected keyword argument 'value'" not in str(error):
            raise
    return optimizer.update(*given)


def _explain(error: Exception, optimizer: Any, state: TrainState) -> None:
    """Raise `PipelineError` where it is known why an optimizer's update failed."""
    if "required keyword-only argument" in str(error):
        raise PipelineError(
            f"the optimizer asks for more than a training step can give it ({error}); beside "
            "gradients, state and parameters it gets the loss, as value. Write an update "
            "function (state, grads, aux) -> (state, metrics) that calls the optimizer."
        ) from error
    wanted: list[Any] = [
        jax.tree.structure(jax.eval_shape(optimizer.init, state.params)),
        jax.tree.structure(state.opt_state),
    ]
    if wanted[0] != wanted[1]:
        raise PipelineError(
            f"state.opt_state is not of this optimizer: its structure is {wanted[1]}, but the "
            f"optimizer makes {wanted[0]}. Make a state with step.init(params)."
        ) from error


def _norm(tree: Any) -> jax.Array:
    """The global norm, in the order and dtypes of ``optax.tree.norm``."""
    squares = [jnp.sum(jnp.real(x * jnp.conj(x))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares))
