"""`TrainStep`: a pipelined gradient and an optimizer's update, each leaf where it lives.

The update is written on whole trees, ``update(state, grads, aux) -> (state, metrics)``; an optax
transformation is made into one. `jaxpipe.lower.update` divides it over the devices. Here states are
brought to the form in which it takes them, and back: a parameter is placed as in
`jaxpipe.lower.place`, a moment lives with its parameter, and what every device holds (counters) is
one array replicated over the mesh.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe._calls import read_call, refuse_deleted, refuse_shapes, refuse_tracing, struct
from jaxpipe._context import outside_meshes
from jaxpipe._optimizer import check_update_function, is_optimizer, update_of
from jaxpipe._options import config_key
from jaxpipe._reference import is_trained
from jaxpipe._run import bring, gradients
from jaxpipe.errors import PipelineError
from jaxpipe.lower.place import Layout, join_copies, on_device, put_copy
from jaxpipe.lower.update import (
    ALL,
    UNKNOWN,
    UpdatePlan,
    merge,
    plan_update,
    split_float,
    trace_update,
)
from jaxpipe.runtime.checks import under_callers_checks

if TYPE_CHECKING:
    from jaxpipe._pipelined import Pipelined


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a training step takes and returns, a pytree.

    ``step``: int32, how many updates have been made. ``params``: as the loss function takes them.
    ``opt_state``: of the optimizer (or whatever an update function keeps). ``model_state``: None
    for now.
    """

    step: Any
    params: Any
    opt_state: Any = None
    model_state: Any = None

    def replace(self, **changes: Any) -> TrainState:
        """The same state with other fields, as a flax state has it: ``state.replace(params=p)``."""
        return replace(self, **changes)


class TrainStep:
    """``step(state, batch) -> (state, metrics)``: pipelined gradients, then the update.

    >>> import jax, jax.numpy as jnp, optax, jaxpipe as jp
    >>> mesh = jax.make_mesh((1,), ("pipe",), devices=jax.devices()[:1])
    >>> loss_fn = jp.pipeline(
    ...     lambda w, x: jnp.mean((x @ w) ** 2), schedule="gpipe", microbatches=2, mesh=mesh
    ... )
    >>> step = loss_fn.train_step(optax.sgd(0.5))
    >>> state = step.init(jnp.ones(2))
    >>> state, metrics = step(state, jnp.ones((4, 2)))
    >>> float(metrics["loss"]), state.params.tolist(), int(state.step)
    (4.0, [-1.0, -1.0], 1)
    """

    def __init__(self, pipelined: Pipelined, update: Any) -> None:
        self.pipelined = pipelined
        self.optimizer = update if is_optimizer(update) else None
        if self.optimizer is None:
            check_update_function(update)
        self.update: Callable = update_of(update) if self.optimizer is not None else update
        self._updates: dict[Any, _Update] = {}
        self._lock = threading.RLock()
        self._copies: dict[int, tuple[jax.Array, tuple[jax.Array, ...]]] = {}
        self._threads = _DeviceThreads(pipelined)

    @outside_meshes
    def init(
        self, params: Any, *args: Any, opt_state: Any = None, rng: Any = None, **kwargs: Any
    ) -> TrainState:
        """A `TrainState` whose arrays are copies of ``params``, each leaf on its stage's devices.

        Where the loss function has not been traced yet (by a call or by ``lower``) and no batch is
        given here (arrays or `jax.ShapeDtypeStruct`), leaves stay where they are until the first
        step brings them to their devices. ``opt_state``: for an update function of one's own.
        """
        refuse_tracing(params)
        refuse_deleted("params", params)
        refuse_shapes("params", params)
        if self.pipelined.traced or args or kwargs:
            params = self.pipelined.place(params, *args, rng=rng, **kwargs)
        else:
            params = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
        if self.optimizer is not None:
            if opt_state is not None:
                raise PipelineError(
                    "opt_state is made by the optimizer here; give one only with an update "
                    "function of your own."
                )
            opt_state = self._init_optimizer(params)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, None)

    def _init_optimizer(self, params: Any) -> Any:
        trained, _ = split_float(params)
        try:
            made = self.optimizer.init(trained)  # type: ignore[union-attr]
        except ValueError:  # it joins leaves that are on several devices
            made = self.optimizer.init(self.pipelined.gather(trained))  # type: ignore[union-attr]
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), made)

    @outside_meshes
    def __call__(
        self, state: TrainState, *args: Any, rng: Any = None, **kwargs: Any
    ) -> tuple[TrainState, Any]:
        """One step: ``(new state, metrics)``. Returns when all work is dispatched.

        ``metrics``: ``loss``, ``grad_norm`` (for an optax optimizer; before any clipping), ``aux``
        with ``has_aux``, and what an update function returns; all replicated over the mesh. The
        buffers of ``state`` are taken over, unless the pipeline has ``donate=False``; a state that
        is not placed yet is copied first.
        """
        if not isinstance(state, TrainState):
            raise PipelineError(
                f"a training step takes a TrainState, not {type(state).__name__}; make one with "
                "step.init(params)."
            )
        refuse_tracing(state)
        refuse_deleted(
            "state",
            state,
            " A training step takes over the buffers of the state it is given: go on with the "
            "state that it returned, or give donate=False to jaxpipe.pipeline.",
        )
        pipelined = self.pipelined
        if pipelined.options.donate:
            state = _apart(state)
        call = read_call(state.params, args, kwargs, rng)
        compiled = pipelined.compiled(call, gradients=True)
        layout = compiled.built.layout
        placed, _ = bring(layout, call, copy=True)
        results, grads = gradients(compiled, placed, call.batch)
        outputs = compiled.built.outputs
        home = layout.replicated[0]
        value = outputs.assemble([jax.device_put(results[k], home) for k in range(len(results))])
        loss, aux = value if outputs.has_aux else (value, None)

        hidden = jax.tree.map(_strong, replace(state, params=None))
        trained, rest = split_float(jax.tree.unflatten(call.params_tree, placed))
        grads_tree = jax.tree.unflatten(call.params_tree, grads)
        extra = aux if self.optimizer is None else loss
        given = (replace(hidden, params=trained), grads_tree, extra)
        positions = tuple(i for i, leaf in enumerate(placed) if is_trained(leaf))
        new, metrics = self._run(self._update_for(layout, given, positions), given)
        new = replace(new, params=merge(new.params, rest))
        metrics = _with_loss(metrics, loss, aux, outputs.has_aux)
        return new, jax.device_put(metrics, layout.everywhere)

    # -- the update ------------------------------------------------------------------------------

    def _update_for(self, layout: Layout, given: Any, trained: tuple[int, ...]) -> _Update:
        leaves, tree = jax.tree.flatten(given)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (id(layout), tree, kinds, config_key())
        with self._lock:
            if key not in self._updates:
                self._updates[key] = self._make_update(layout, given, trained)
            return self._updates[key]

    def _make_update(self, layout: Layout, given: Any, trained: tuple[int, ...]) -> _Update:
        traced = trace_update(self.update, *jax.tree.map(struct, given))
        state, grads, aux = given
        homes = jax.tree.unflatten(
            jax.tree.structure(grads), [layout.owners[i][0] for i in trained]
        )
        owners = (
            replace(jax.tree.map(lambda _: UNKNOWN, state), params=homes),
            homes,
            jax.tree.map(lambda _: 0, aux),
        )
        specs = _leaf_specs(given, [layout.specs[i] for i in trained])
        plan = plan_update(
            traced,
            jax.tree.leaves(owners),
            layout.submeshes,
            specs=specs,
            copies={
                FIRST_PARAM + k: layout.owners[i][1:]
                for k, i in enumerate(trained)
                if len(layout.owners[i]) > 1
            },
            donate=self.pipelined.options.donate,
        )
        return _Update(layout, plan, specs, trained)

    def _run(self, update: _Update, given: Any) -> tuple[Any, Any]:
        plan, layout = update.plan, update.layout
        inputs = [self._taken(update, i, leaf) for i, leaf in enumerate(jax.tree.leaves(given))]
        outputs = plan(inputs, pool=self._threads)
        new: list[Any] = []
        copies: dict[int, tuple[jax.Array, tuple[jax.Array, ...]]] = {}
        for o, made in enumerate(outputs[: plan.state_leaves]):
            if not isinstance(made, tuple):
                new.append(made)
            elif plan.owners[o] == ALL:
                new.append(_replicated(layout, made))
                copies[id(new[-1])] = (new[-1], made)
            else:  # a tied parameter; its owner, the lowest device, comes first
                new.append(join_copies(layout, update.trained[o - FIRST_PARAM], made))
        self._copies = copies
        state = jax.tree.unflatten(jax.tree.structure(given[0]), new)
        return state, jax.tree.unflatten(plan.metrics, outputs[plan.state_leaves :])

    def _taken(self, update: _Update, i: int, leaf: Any) -> Any:
        """An input leaf as the update takes it: on its owner, or one copy for each device."""
        layout, owner = update.layout, update.plan.owners[i]
        if owner == ALL:
            known = self._copies.get(id(leaf))
            if known is not None and known[0] is leaf:
                return known[1]
            return [put_copy(leaf, at) for at in layout.replicated]
        k = i - FIRST_PARAM
        if 0 <= k < len(update.trained):
            return on_device(layout, update.trained[k], leaf, owner)
        if i >= update.plan.state_leaves:
            return leaf  # gradients and aux are where they are wanted
        sharding = NamedSharding(layout.submeshes[owner], update.specs[i])
        if leaf.sharding == sharding:
            return leaf
        return put_copy(leaf, sharding)


FIRST_PARAM = 1  # a state's flat leaves are its step, then its parameters


@dataclass(frozen=True, eq=False)
class _Update:
    """A compiled update of states of one kind.

    ``specs``: of each input leaf within a submesh. ``trained``: the flat position, in the whole
    parameter tree, of each parameter that the update sees.
    """

    layout: Layout
    plan: UpdatePlan
    specs: list[PartitionSpec]
    trained: tuple[int, ...]


def _leaf_specs(given: Any, param_specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """The layout of each leaf of (state, grads, aux) within a submesh.

    A leaf whose path ends with a parameter's and has its shape (its gradient, its moments) is laid
    out like it; others are whole on each chip.
    """
    known = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(given[1]), param_specs, strict=True
        )
    }

    def spec_of(path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
        for start in range(len(path) + 1):
            fits = known.get(path[start:])
            if fits is not None and fits[0] == shape:
                return fits[1]
        return PartitionSpec()

    return [
        spec_of(tuple(path), leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(given)
    ]


def _replicated(layout: Layout, copies: Sequence[jax.Array]) -> jax.Array:
    parts = [shard.data for copy in copies for shard in copy.addressable_shards]
    return jax.make_array_from_single_device_arrays(copies[0].shape, layout.everywhere, parts)


def _strong(leaf: Any) -> jax.Array:
    """A leaf of the state as an array without weak type, so that it stays of one type."""
    if isinstance(leaf, jax.Array):
        return leaf
    return jnp.asarray(leaf, jnp.result_type(leaf))


def _apart(tree: Any) -> Any:
    """The same tree, in which no array occurs twice: its buffers may all be donated."""
    seen: set[int] = set()

    def once(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            return jnp.array(leaf, copy=True)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(once, tree)


def _with_loss(metrics: Any, loss: Any, aux: Any, has_aux: bool) -> Any:
    own = {"loss": loss, "aux": aux} if has_aux else {"loss": loss}
    if isinstance(metrics, dict):
        return {**own, **metrics}
    return {**own, "metrics": metrics}


class _DeviceThreads(Executor):
    """Runs each call of an update in the thread of its device."""

    def __init__(self, pipelined: Pipelined) -> None:
        self._pipelined = pipelined

    def submit(self, fn: Callable, call: Any, *args: Any) -> Future:  # type: ignore[override]
        future: Future = Future()

        def job() -> None:
            try:
                future.set_result(fn(call, *args))
            except BaseException as error:  # handed to whoever waits for the result
                future.set_exception(error)

        self._pipelined.workers.submit_to(call.device, under_callers_checks(job))
        return future
