"""Where arrays live: submeshes, the owners of each parameter leaf, and moving trees there and back.

A *device* of the pipeline is a position on the mesh's pipeline axis: one chip, or the submesh that
the mesh's other axes span there. A parameter leaf lives on the devices of the stages that use it,
and a leaf that no stage uses lives on device 0. The *placed* form of a leaf is an ordinary
`jax.Array` in the ordinary tree:

- a leaf of one device has a `NamedSharding` on that device's submesh;
- a *tied* leaf, used by stages on several devices, is one array replicated along the pipeline axis
  over just those devices. Every device reads its own copy, there is no second set of references
  that could go stale, and leafwise code treats it like any other leaf.

This file knows leaves by their flat position and nothing of stages' programs or schedules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpipe.errors import PipelineError


def default_mesh(axis: str) -> Mesh:
    """All devices of this process on one axis, of type Auto."""
    return jax.make_mesh((jax.device_count(),), (axis,), axis_types=(jax.sharding.AxisType.Auto,))


def pipeline_submeshes(mesh: Mesh, axis: str) -> tuple[Mesh, ...]:
    """The submesh of each position on ``axis``, spanned by the mesh's other axes.

    Raises `PipelineError` when the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise PipelineError(
            f"the mesh has no axis {axis!r}: its axes are {tuple(mesh.axis_names)}. Name one of "
            f"them with jaxpipe.pipeline(..., axis=...), or make a mesh that has {axis!r}."
        )
    return tuple(_slice(mesh, axis, position) for position in range(mesh.shape[axis]))


def _slice(mesh: Mesh, axis: str, position: int) -> Mesh:
    at = mesh.axis_names.index(axis)
    names = tuple(name for name in mesh.axis_names if name != axis)
    types = tuple(
        t for name, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if name != axis
    )
    return Mesh(np.take(mesh.devices, position, axis=at), names, axis_types=types)


def _union(mesh: Mesh, axis: str, positions: Sequence[int]) -> Mesh:
    at = mesh.axis_names.index(axis)
    return Mesh(
        np.take(mesh.devices, list(positions), axis=at),
        mesh.axis_names,
        axis_types=mesh.axis_types,
    )


@dataclass(frozen=True, eq=False)
class Layout:
    """Which devices hold each parameter leaf, and under which shardings.

    ``owners[i]``: devices of flat leaf i, ascending; the first is its *home*. ``specs[i]``: its
    layout within a submesh. ``shardings[i]``: the placed leaf's sharding. ``local[d][i]``: leaf
    i's sharding on device d alone. ``replicated[d]``: a whole copy on device d.
    """

    mesh: Mesh
    axis: str
    submeshes: tuple[Mesh, ...]
    owners: tuple[tuple[int, ...], ...]
    specs: tuple[PartitionSpec, ...]
    shardings: tuple[NamedSharding, ...]
    local: tuple[dict[int, NamedSharding], ...]
    replicated: tuple[NamedSharding, ...]
    everywhere: NamedSharding

    @property
    def devices(self) -> int:
        return len(self.submeshes)


def make_layout(
    mesh: Mesh, axis: str, owners: Sequence[Iterable[int]], specs: Sequence[PartitionSpec]
) -> Layout:
    """The layout in which flat leaf i lives on the devices ``owners[i]`` under ``specs[i]``."""
    submeshes = pipeline_submeshes(mesh, axis)
    homes = tuple(tuple(sorted(set(o))) or (0,) for o in owners)
    unions: dict[tuple[int, ...], Mesh] = {(d,): m for d, m in enumerate(submeshes)}
    shardings = []
    local: tuple[dict[int, NamedSharding], ...] = tuple({} for _ in submeshes)
    for leaf, (devices, spec) in enumerate(zip(homes, specs, strict=True)):
        if devices not in unions:
            unions[devices] = _union(mesh, axis, devices)
        shardings.append(NamedSharding(unions[devices], spec))
        for device in devices:
            local[device][leaf] = (
                shardings[-1] if len(devices) == 1 else NamedSharding(submeshes[device], spec)
            )
    return Layout(
        mesh=mesh,
        axis=axis,
        submeshes=submeshes,
        owners=homes,
        specs=tuple(specs),
        shardings=tuple(shardings),
        local=local,
        replicated=tuple(NamedSharding(m, PartitionSpec()) for m in submeshes),
        everywhere=NamedSharding(mesh, PartitionSpec()),
    )


def check_spec(name: str, shape: tuple[int, ...], spec: Any, mesh: Mesh, axis: str) -> None:
    """Raise `PipelineError` unless ``spec`` can lay out an array within a submesh of ``mesh``."""
    others = {a: n for a, n in mesh.shape.items() if a != axis}
    told = f"param_specs gives {name}, of shape {shape}, {spec!r}"
    if not isinstance(spec, PartitionSpec):
        raise PipelineError(f"{told}, which is no jax.sharding.PartitionSpec; give one, or None.")
    if len(spec) > len(shape):
        raise PipelineError(f"{told}, which has {len(spec)} entries for {len(shape)} dimensions.")
    used: set[str] = set()
    for position, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        for one in names:
            if one is PartitionSpec.UNCONSTRAINED:
                raise PipelineError(f"{told}, but parameters need a definite layout.")
            if one == axis:
                raise PipelineError(
                    f"{told}, but {axis!r} is the pipeline's axis: a parameter lives on the "
                    f"devices of its stage. Axes to lay it out over are {list(others)}."
                )
            if one not in others:
                raise PipelineError(
                    f"{told}, but {one!r} is no axis of the mesh; axes to lay it out over are "
                    f"{list(others)}."
                )
            if one in used:
                raise PipelineError(f"{told}, which uses {one!r} twice.")
            used.add(one)
        parts = math.prod(others[one] for one in names)
        if shape[position] % parts:
            raise PipelineError(
                f"{told}, but its dimension {position} of size {shape[position]} cannot be "
                f"divided over {parts} devices."
            )


def is_placed(layout: Layout, leaf: int, array: Any) -> bool:
    """Whether ``array`` already is the placed form of flat leaf ``leaf``."""
    sharding = getattr(array, "sharding", None)
    target = layout.shardings[leaf]
    return sharding is target or sharding == target


def place_leaf(layout: Layout, leaf: int, array: Any, *, copy: bool) -> jax.Array:
    """The placed form of flat leaf ``leaf``; with ``copy`` it shares no buffer with ``array``."""
    sharding = layout.shardings[leaf]
    return put_copy(array, sharding) if copy else jax.device_put(array, sharding)


def put_copy(array: Any, sharding: Sharding) -> jax.Array:
    """``array`` under ``sharding``, in buffers of its own, which may be donated.

    `jax.device_put` heeds ``may_alias=False`` from one device to one device only: to or from an
    array replicated over several, the copy on a device that already has the array shares its
    buffer; and a NumPy array's memory is shared on CPU where it is aligned (tried, jax 0.10.2 and
    0.12).
    """
    if isinstance(array, np.ndarray):
        array = array.copy()
    if len(sharding.device_set) > 1:
        return jax.device_put(jnp.array(array, copy=True), sharding)
    if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
        return jnp.array(jax.device_put(array, sharding), copy=True)
    return jax.device_put(array, sharding, may_alias=False)


def on_device(layout: Layout, leaf: int, array: jax.Array, device: int) -> jax.Array:
    """Device ``device``'s own copy of a placed leaf; shares the placed leaf's buffers."""
    if len(layout.owners[leaf]) == 1:
        return array
    sharding = layout.local[device][leaf]
    wanted = sharding.device_set
    parts = [s.data for s in array.addressable_shards if s.device in wanted]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def join_copies(layout: Layout, leaf: int, copies: Sequence[jax.Array]) -> jax.Array:
    """The placed form of a leaf from one copy per owner, in the order of ``layout.owners``.

    Inverse of `on_device` over all owners.
    """
    if len(copies) == 1:
        return copies[0]
    parts = [shard.data for copy in copies for shard in copy.addressable_shards]
    return jax.make_array_from_single_device_arrays(copies[0].shape, layout.shardings[leaf], parts)


def gather_tree(tree: Any, device: jax.Device) -> Any:
    """A copy of every array of ``tree``, whole on ``device``; other leaves are left as they are.

    A copy, for a training step may take over the buffers of what was gathered.
    """
    whole = SingleDeviceSharding(device)
    return jax.tree.map(
        lambda leaf: put_copy(leaf, whole) if isinstance(leaf, jax.Array) else leaf, tree
    )
