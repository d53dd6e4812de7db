"""The update of a training state as per-device programs: local, home, local.

``update(state, grads, aux) -> (state, metrics)`` is written on whole trees, and its leaves live on
several devices. It is traced once (`trace_update`), every leaf gets an owner (`find_owners`), the
equations are divided into parts (`divide`), and each part becomes one program (`plan_update`).
Leafwise equations run where their leaf lives; scalars that join leaves (a global norm) travel
packed to one home device, are joined there in traced order, and come back packed. So the result is
that of
the plain update, whatever the number of devices.

An `UpdatePlan` is data: calls of compiled programs and moves between devices, on numbered
*registers*. Calling it runs them in order. This file knows no pipelines and no schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.errors import PipelineError, error_in_words
from jaxpipe.lower.compile import Job, JobTable, compile_jobs
from jaxpipe.lower.flatten_update import (
    ALL,
    NEVER,
    Flattened,
    TracedUpdate,
    arrives,
    flatten_update,
    trace_update,
)
from jaxpipe.lower.owners import UNKNOWN, find_owners, merge, split_float
from jaxpipe.lower.part_program import Signature, fingerprint, part_function, sign
from jaxpipe.lower.rounds import HOME, Part, Rounds, divide

__all__ = [
    "ALL",
    "UNKNOWN",
    "Call",
    "Move",
    "UpdatePlan",
    "find_owners",
    "merge",
    "plan_update",
    "split_float",
    "trace_update",
]


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """Run ``program`` on ``device``: ``results`` registers from ``arguments`` registers."""

    device: int
    program: Callable[..., list[jax.Array]]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    donated: tuple[int, ...]  # registers whose buffers the program overwrites


@dataclass(frozen=True, eq=False, slots=True)
class Move:
    """Copy registers to other devices, in one call."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    shardings: tuple[NamedSharding, ...]


Group = tuple[Call, ...] | Move


@dataclass(frozen=True, eq=False)
class UpdatePlan:
    """An update, compiled.

    ``groups``: in order; the calls of a group are on different devices and may run at once.
    ``owners``: the owner of each input leaf (flat: state, grads, aux). ``inputs[i]``: the registers
    of input leaf i, ``outputs[o]``: those of output leaf o (flat: state, metrics): one for a leaf
    of one device, one for each device for a leaf of `ALL`, the owner's and then its copies' for a
    tied
    leaf. ``last``: the number of local phases.
    """

    groups: tuple[Group, ...]
    registers: int
    owners: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    state_leaves: int
    metrics: Any
    last: int
    programs: int

    def __call__(
        self, inputs: Sequence[Any], *, pool: Executor | None = None
    ) -> list[jax.Array | tuple[jax.Array, ...]]:
        """Run the update on flat inputs (state, grads, aux); returns flat outputs (state, metrics).

        A leaf of one device is an array there; a leaf of `ALL` is a sequence with one array for
        each device. Outputs have the same form, and metrics are arrays on the home device. State
        leaves are donated where the plan says so. With ``pool`` the programs of different devices
        are called from its threads, so that small programs on emulated devices run at once.
        """
        registers: list[Any] = [None] * self.registers
        for where, leaf in zip(self.inputs, inputs, strict=True):
            if len(where) == 1:
                registers[where[0]] = leaf[0] if isinstance(leaf, list | tuple) else leaf
            else:
                for register, copy in zip(where, leaf, strict=True):
                    registers[register] = copy
        for group in self.groups:
            if isinstance(group, Move):
                moved = jax.device_put([registers[i] for i in group.sources], list(group.shardings))
                for register, array in zip(group.targets, moved, strict=True):
                    registers[register] = array
            elif pool is None or len(group) == 1:
                for call in group:
                    _attempt(call, partial(_run, call, registers))
            else:
                for call, done in [(c, pool.submit(_run, c, registers)) for c in group]:
                    _attempt(call, done.result)
        return [
            registers[where[0]] if len(where) == 1 else tuple(registers[i] for i in where)
            for where in self.outputs
        ]


def _attempt(call: Call, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        raise PipelineError(
            f"Device {call.device} failed in the optimizer's update: {error_in_words(error)} "
            "Leaves of the state may have been overwritten by then: go on from a checkpoint, or "
            "give donate=False to jaxpipe.pipeline to keep every state until the next one is there."
        ) from error


def _run(call: Call, registers: list[Any]) -> None:
    results = call.program(*[registers[i] for i in call.arguments])
    for register, array in zip(call.results, results, strict=False):  # pins have no register
        registers[register] = array


def plan_update(
    traced: TracedUpdate,
    owners: Sequence[int],
    submeshes: Sequence[Mesh],
    *,
    specs: Sequence[PartitionSpec] | None = None,
    copies: Mapping[int, Sequence[int]] | None = None,
    home: int = 0,
    donate: bool = True,
) -> UpdatePlan:
    """Divide a traced update over devices and compile it.

    ``owners``: for each flat input (state, grads, aux) a device, `ALL`, or `UNKNOWN`.
    ``submeshes``: each device's chips. ``specs``: the layout of each input leaf on its submesh
    (default: whole on each chip). ``copies[i]``: devices other than the owner that hold state leaf
    i (a tied parameter): they are sent its new value. ``donate``: whether new state leaves take
    over the buffers of the old.

    Raises `PipelineError` where the update joins arrays of several devices.
    """
    if len(owners) != len(traced.avals):
        raise PipelineError(
            f"the update has {len(traced.avals)} input leaves, but {len(owners)} owners are given; "
            "give one owner for each leaf of (state, grads, aux)."
        )
    found = find_owners(traced, owners, home=home)
    flat = flatten_update(traced, found)
    _refuse_moves(traced, flat, found, len(submeshes))
    rounds = divide(flat, found, traced.state_leaves, len(submeshes), home)
    planner = _Planner(traced, flat, rounds, found, tuple(submeshes), specs, home, donate)
    return planner.plan(copies or {})


def _refuse_moves(
    traced: TracedUpdate, flat: Flattened, owners: Sequence[int], devices: int
) -> None:
    """Raise `PipelineError` where an array of one device would become a state leaf of another."""
    for leaf, atom in enumerate(flat.outputs[: traced.state_leaves]):
        if not isinstance(atom, int):
            continue
        place, owner = flat.places[atom], owners[leaf]
        homes = range(devices) if owner == ALL else [owner]
        if any(arrives(place, device) == NEVER for device in homes):
            where = "every device" if owner == ALL else f"device {owner}"
            raise PipelineError(
                f"the update puts an array of device {place.device} into {traced.paths[leaf]}, "
                f"which is on {where}; between devices only scalars travel in an update. Move the "
                "array outside of the step, or keep it with the parameters of its own stage."
            )


class _Planner:
    """Turns parts into jobs, and their order into calls and moves on registers."""

    def __init__(
        self,
        traced: TracedUpdate,
        flat: Flattened,
        rounds: Rounds,
        owners: tuple[int, ...],
        submeshes: tuple[Mesh, ...],
        specs: Sequence[PartitionSpec] | None,
        home: int,
        donate: bool,
    ):
        self.traced, self.flat, self.rounds, self.owners = traced, flat, rounds, owners
        self.submeshes, self.home, self.donate = submeshes, home, donate
        self.specs = tuple(specs) if specs is not None else (PartitionSpec(),) * len(owners)
        self.parts = {(part.place, part.phase): part for part in rounds.parts}
        self.signatures = {key: sign(flat, part, self.parts) for key, part in self.parts.items()}
        self.registers: dict[Hashable, int] = {}
        self.unchanged = {i for _, i in rounds.unchanged}

    def device(self, place: int) -> int:
        return self.home if place == HOME else place

    def whole(self, device: int) -> NamedSharding:
        return NamedSharding(self.submeshes[device], PartitionSpec())

    def sharding(self, leaf: int, device: int) -> NamedSharding:
        return NamedSharding(self.submeshes[device], self.specs[leaf])

    def register(self, *name: Hashable) -> int:
        return self.registers.setdefault(name, len(self.registers))

    def leaf(self, leaf: int, device: int) -> int:
        return self.register("leaf", leaf, device if self.owners[leaf] == ALL else 0)

    # -- programs ------------------------------------------------------------------------------

    def jobs(self) -> JobTable:
        table = JobTable(roles=[{} for _ in self.submeshes])
        functions: dict[Hashable, Callable[..., list]] = {}
        for key, part in self.parts.items():
            signature = self.signatures[key]
            shared = fingerprint(self.flat, part, signature)
            if shared not in functions:
                functions[shared] = part_function(self.flat, part, signature)
                functions[shared].__name__ = "update_home" if part.place == HOME else "update_local"
            job = self.job(part, signature, functions[shared])
            table.add(self.device(part.place), key, key, lambda job=job: job)  # type: ignore[misc]
        return table

    def job(self, part: Part, signature: Signature, function: Callable[..., list]) -> Job:
        device = self.device(part.place)
        whole = self.whole(device)
        avals = [_struct(self.flat.avals[v]) for v in (*signature.leaves, *signature.kept)]
        avals += [
            jax.ShapeDtypeStruct((len(self.sent(place, phase)[dtype]),), dtype)
            for place, phase, dtype in signature.vectors
        ]
        arguments = [self.sharding(leaf, device) for leaf in signature.leaves]
        arguments += [whole] * (len(avals) - len(arguments))
        results = [
            self.sharding(o, device) if o < self.traced.state_leaves else whole
            for o, _ in part.results
        ]
        results += [whole] * (len(signature.keeps) + len(signature.packed) + len(part.pins))
        return Job(
            name=f"update of device {part.place}, phase {part.phase}",
            fun=function,
            avals=tuple(avals),
            in_shardings=tuple(arguments),
            out_shardings=results,
            donate=self.donated(part, signature),
        )

    def sent(self, place: int, phase: int) -> dict[Any, tuple[int, ...]]:
        return dict(self.signatures[place, phase].packed)

    def donated(self, part: Part, signature: Signature) -> tuple[int, ...]:
        """Arguments that are old state leaves whose new value this part makes."""
        if not self.donate or part.place == HOME or part.phase != self.rounds.last:
            return ()
        made = {o for o, _ in part.results}
        return tuple(
            position
            for position, leaf in enumerate(signature.leaves)
            if leaf in made and self.owners[leaf] != ALL and leaf not in self.unchanged
        )

    # -- the order -----------------------------------------------------------------------------

    def plan(self, copies: Mapping[int, Sequence[int]]) -> UpdatePlan:
        table = self.jobs()
        executables = compile_jobs(table, title="update")
        devices = range(len(self.submeshes))
        inputs = tuple(
            tuple(self.leaf(i, d) for d in devices) if owner == ALL else (self.leaf(i, owner),)
            for i, owner in enumerate(self.owners)
        )
        groups: list[Group] = []
        for phase in range(1, self.rounds.last + 1):
            for at_home in (False, True):
                keys = [k for k in self.parts if k[1] == phase and (k[0] == HOME) == at_home]
                if not keys:
                    continue
                groups.append(tuple(self.call(k, executables.by_role) for k in sorted(keys)))
                groups += self.moves(phase, at_home)
        outputs, final = self.outputs(copies)
        return UpdatePlan(
            groups=(*groups, *final),
            registers=len(self.registers),
            owners=self.owners,
            inputs=inputs,
            outputs=outputs,
            state_leaves=self.traced.state_leaves,
            metrics=self.traced.metrics,
            last=self.rounds.last,
            programs=len(self.parts),
        )

    def call(self, key: tuple[int, int], by_role: Sequence[Mapping]) -> Call:
        part, signature = self.parts[key], self.signatures[key]
        device = self.device(part.place)
        arguments = [self.leaf(leaf, device) for leaf in signature.leaves]
        arguments += [self.register("kept", part.place, v) for v in signature.kept]
        arguments += [self.register("vector", vector, device) for vector in signature.vectors]
        results = [self.register("output", o, device) for o, _ in part.results]
        results += [self.register("kept", part.place, v) for v in signature.keeps]
        results += [self.register("vector", (*key, dtype), device) for dtype, _ in signature.packed]
        donated = tuple(arguments[i] for i in self.donated(part, signature))
        return Call(device, by_role[device][key], tuple(arguments), tuple(results), donated)

    def moves(self, phase: int, from_home: bool) -> list[Group]:
        """Packed vectors made in this phase, to the devices whose later parts read them."""
        wanted: dict[tuple[Vector, int], None] = {}
        for key, signature in self.signatures.items():
            for vector in signature.vectors:
                source, sent_in, _ = vector
                to = self.device(key[0])
                moves = sent_in == phase and (source == HOME) == from_home
                if moves and to != self.device(source):
                    wanted[vector, to] = None
        if not wanted:
            return []
        return [
            Move(
                tuple(self.register("vector", v, self.device(v[0])) for v, _ in wanted),
                tuple(self.register("vector", v, to) for v, to in wanted),
                tuple(self.whole(to) for _, to in wanted),
            )
        ]

    def outputs(
        self, copies: Mapping[int, Sequence[int]]
    ) -> tuple[tuple[tuple[int, ...], ...], list[Group]]:
        unchanged = dict(self.rounds.unchanged)
        devices = range(len(self.submeshes))
        outputs: list[tuple[int, ...]] = []
        sources: list[int] = []
        targets: list[int] = []
        shardings: list[NamedSharding] = []

        def send(o: int, source: int, device: int, sharding: NamedSharding) -> int:
            sources.append(source)
            targets.append(self.register("output", o, device))
            shardings.append(sharding)
            return targets[-1]

        for o in range(len(self.flat.outputs)):
            if o >= self.traced.state_leaves:
                if o in unchanged:
                    outputs.append((self.leaf(unchanged[o], self.home),))
                elif o in self.rounds.on_device and self.rounds.on_device[o] != self.home:
                    source = self.register("output", o, self.rounds.on_device[o])
                    outputs.append((send(o, source, self.home, self.whole(self.home)),))
                else:
                    outputs.append((self.register("output", o, self.home),))
                continue
            owner = self.owners[o]
            held = tuple(devices) if owner == ALL else (owner,)
            if o in unchanged:
                registers = tuple(self.leaf(unchanged[o], d) for d in held)
            else:
                registers = tuple(self.register("output", o, d) for d in held)
            if owner != ALL:
                registers += tuple(
                    send(o, registers[0], d, self.sharding(o, d))
                    for d in copies.get(o, ())
                    if d != owner
                )
            outputs.append(registers)
        final: list[tuple[Call, ...] | Move] = []
        if sources:
            final.append(Move(tuple(sources), tuple(targets), tuple(shardings)))
        return tuple(outputs), final


Vector = tuple[int, int, Any]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
    )
