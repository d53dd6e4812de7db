"""`Pipelined`: a loss function with a schedule, called like the function it was made of.

It keeps what it has built and compiled by the kind of call (tree structures, shapes, dtypes and
JAX's configuration), and the threads that run the devices. How a step runs is the `Engine`'s work;
here arguments are brought to their devices and results back.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from jaxpipe._build import Built, Compiled, build, compile_built, schedule_of
from jaxpipe._calls import Call, read_call, refuse_deleted, refuse_shapes, refuse_tracing
from jaxpipe._context import outside_meshes
from jaxpipe._options import Options, check_names, config_key
from jaxpipe._reference import Reference
from jaxpipe._run import bring, forward, gradients, grads_as_given, outcome
from jaxpipe._trees import check_same_tree
from jaxpipe.errors import PipelineError
from jaxpipe.lower.lowered import Lowered
from jaxpipe.lower.place import (
    Layout,
    default_mesh,
    gather_tree,
    pipeline_submeshes,
    place_leaf,
)
from jaxpipe.runtime.workers import Workers

if TYPE_CHECKING:
    from jaxpipe._train import TrainStep


def _refuse_method(fun: Callable) -> None:
    """A decorated method would be called without its object."""
    try:
        first = next(iter(inspect.signature(fun).parameters), None)
    except (TypeError, ValueError):
        return
    if first == "self":
        name = getattr(fun, "__name__", "loss")
        raise PipelineError(
            f"{getattr(fun, '__qualname__', name)} takes self, but a pipelined function takes "
            "(params, batch). Make a pipeline of the bound method instead, once for each object: "
            f"self.{name} = jaxpipe.pipeline(self.{name}, ...) in __init__."
        )


class Pipelined:
    """What `jaxpipe.pipeline` makes of a loss function."""

    def __init__(self, fun: Callable, options: Options) -> None:
        if not callable(fun):
            raise PipelineError(f"jaxpipe.pipeline takes a function, not {fun!r}.")
        _refuse_method(fun)
        functools.update_wrapper(self, fun, updated=())  # a function's attributes are its own
        self.fun = fun
        self.options = options
        if options.mesh is not None:  # a wrong mesh is told at once
            pipeline_submeshes(options.mesh, options.axis)
        self._lock = threading.RLock()
        self._built: dict[Any, Built] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._groups: tuple[int, ...] | None = None
        self._params: Any = None  # the abstract parameter tree, once traced
        self._layout: Layout | None = None

    # -- what the user calls ---------------------------------------------------------------------

    @outside_meshes
    def __call__(self, params: Any, *args: Any, rng: Any = None, **kwargs: Any) -> Any:
        """Run the schedule's forwards alone: the loss, ``(loss, aux)``, or joined outputs.

        ``params``: placed or not. ``args``, ``kwargs``: the batch. ``rng``: a key; microbatch i
        gets ``jax.random.fold_in(rng, i)`` as the function's ``rng`` (or last) argument.
        """
        call = read_call(params, args, kwargs, rng)
        compiled = self.compiled(call, gradients=False)
        placed, kept = bring(compiled.built.layout, call)
        results = forward(compiled, placed, call.batch)
        return outcome(compiled.built, results, call, kept)

    @outside_meshes
    def value_and_grad(self, params: Any, *args: Any, rng: Any = None, **kwargs: Any) -> Any:
        """``(loss, grads)``, or ``((loss, aux), grads)``; arguments as of a call.

        Gradients have the structure of ``params`` and come back placed as the parameters were
        given. Integer, boolean and key leaves get float0 zeros, as with ``allow_int=True``.
        """
        call = read_call(params, args, kwargs, rng)
        compiled = self.compiled(call, gradients=True)
        placed, kept = bring(compiled.built.layout, call)
        results, grads = gradients(compiled, placed, call.batch)
        leaves = grads_as_given(compiled.built.layout, call, grads, kept)
        value = outcome(compiled.built, results, call, kept)
        return value, jax.tree.unflatten(call.params_tree, leaves)

    def train_step(self, update: Any) -> TrainStep:
        """A training step with an optax optimizer, or with a function of one's own.

        ``update``: an `optax.GradientTransformation`, or a function ``update(state, grads, aux) ->
        (state, metrics)`` for logic beyond optax. See `TrainStep`.
        """
        from jaxpipe._train import TrainStep

        return TrainStep(self, update)

    @outside_meshes
    def lower(self, params: Any, *args: Any, rng: Any = None, **kwargs: Any) -> Lowered:
        """Trace, cut, check and plan, and allocate nothing on devices.

        Arguments as of a call; their leaves may be `jax.ShapeDtypeStruct`. For a forward-only
        schedule, and for ``reduce="concat"``, the lowered pipeline is that of a call.
        """
        call = read_call(params, args, kwargs, rng, shapes=True)
        forward = self.options.reduce == "concat"
        with self._lock:
            built = self._build(call, gradients=not forward and not self._forward_only())

            @outside_meshes
            def compile_memory() -> Any:
                executables = self._compile_built(built).executables
                return tuple(
                    m.with_temporaries(t)
                    for m, t in zip(built.memory, executables.temporaries, strict=True)
                )

            return Lowered(
                built.schedule, built.plan, built.memory, built.graph, built.traced, compile_memory
            )

    @outside_meshes
    def place(self, params: Any, *args: Any, rng: Any = None, **kwargs: Any) -> Any:
        """A copy of ``params`` with each leaf on the devices of the stages that use it.

        Which stages those are is known once the function has been traced: by an earlier call or
        `lower`, or give a batch here (arrays or `jax.ShapeDtypeStruct`). A tied leaf, used on
        several devices, becomes one array replicated over them.
        """
        refuse_tracing(params)
        refuse_deleted("params", params)
        refuse_shapes("params", params)
        layout = self.layout(params, *args, rng=rng, **kwargs)
        leaves, tree = jax.tree.flatten(params)
        placed = [place_leaf(layout, i, leaf, copy=True) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, placed)

    @outside_meshes
    def gather(self, tree: Any) -> Any:
        """Any tree of arrays (parameters, gradients, optimizer state) whole on one device."""
        refuse_tracing(tree)
        refuse_deleted("tree", tree)
        return gather_tree(tree, self.mesh.devices.flat[0])

    @outside_meshes
    def init(self, init_fn: Callable, *args: Any) -> Any:
        """``init_fn(*args)``, each device computing only the leaves that it owns.

        Values equal those of ``jax.jit(init_fn)(*args)``. The function must have been traced
        before, by `lower` with shapes (``jax.eval_shape(init_fn, *args)``) for instance.
        """
        from jaxpipe.lower.init import init_placed

        refuse_tracing(args)
        if not callable(init_fn):
            raise PipelineError(f"init takes a function that makes parameters, not {init_fn!r}.")
        shapes = jax.eval_shape(init_fn, *args)
        return init_placed(init_fn, args, self.layout(shapes))

    def replace(self, **changes: Any) -> Pipelined:
        """The same function with other options, as a new `Pipelined`.

        ``loss_fn.replace(schedule="zb_h1", microbatches=16)``
        """
        check_names(changes)
        return Pipelined(self.fun, replace(self.options, **changes))

    @functools.cached_property
    def reference(self) -> Reference:
        """The same function without a pipeline: microbatch loop, seeds, reduction and keys."""
        return Reference(self.fun, self.options)

    def __reduce__(self) -> Any:
        return Pipelined, (self.fun, self.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipelined:
        return Pipelined(self.fun, self.options)  # devices cannot be copied

    def __repr__(self) -> str:
        return (
            f"<pipelined {getattr(self.fun, '__name__', self.fun)!s}: schedule="
            f"{self.options.schedule!r}, microbatches={self.options.microbatches}>"
        )

    # -- building --------------------------------------------------------------------------------

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh, by default all devices on one axis."""
        return self.options.mesh or default_mesh(self.options.axis)

    @functools.cached_property
    def submeshes(self) -> tuple[jax.sharding.Mesh, ...]:
        """The submesh of each pipeline device."""
        return pipeline_submeshes(self.mesh, self.options.axis)

    @functools.cached_property
    def workers(self) -> Workers:
        """The threads, one for each pipeline device."""
        return Workers(len(self.submeshes))

    def layout(self, params: Any, *args: Any, rng: Any = None, **kwargs: Any) -> Layout:
        """Where each parameter leaf lives; a batch is needed unless traced before."""
        with self._lock:
            if args or kwargs:
                call = read_call(params, args, kwargs, rng, shapes=True)
                self._build(call, gradients=False)
            if self._layout is None:
                raise PipelineError(
                    "which stage uses which parameter is not known yet: the function has not been "
                    "traced. Give a batch as well (arrays or jax.ShapeDtypeStruct), or call "
                    ".lower(params, batch) first."
                )
            check_same_tree("the parameters", params, self._params)
            return self._layout

    @property
    def traced(self) -> bool:
        """Whether it is known which stage uses which parameter."""
        return self._layout is not None

    def _forward_only(self) -> bool:
        return schedule_of(self.options, len(self.submeshes)).forward_only

    def _build(self, call: Call, *, gradients: bool) -> Built:
        key = (call.signature(), gradients, config_key())
        if key in self._built:
            return self._built[key]
        if self._params is not None:
            check_same_tree("the parameters", call.unflat_params, self._params)
        built = build(
            self.fun,
            self.options,
            call,
            self.mesh,
            self.submeshes,
            gradients=gradients,
            groups=self._groups,
        )
        self._built[key] = built
        self._groups = built.groups
        self._params = jax.tree.unflatten(call.params_tree, built.graph.param_avals)
        self._layout = self._layout or built.layout
        return built

    def _compile_built(self, built: Built) -> Compiled:
        for compiled in self._compiled.values():
            if compiled.built is built:
                return compiled
        return compile_built(built, self.workers)

    def compiled(self, call: Call, *, gradients: bool) -> Compiled:
        """The compiled pipeline for this kind of call."""
        key = (call.signature(), gradients, config_key())
        compiled = self._compiled.get(key)
        if compiled is None:
            with self._lock:
                built = self._build(call, gradients=gradients)
                compiled = self._compiled[key] = self._compile_built(built)
        return compiled
