"""Dividing an update into parts: which device runs which steps in which phase.

Local phases 1..n alternate with home phases: local 1, home 1, local 2, ... A *part* is what one
device (or home) runs in one phase. Demands go backward from the results: every result of a device
is due in the last local phase, and a step runs as late as its demands allow, so that whatever home
does not need is left to the last phase. Between places only scalars travel. A scalar that home has
joined comes from home, so that all devices see the same bits. A value needed in two phases of a
device is computed again if that is cheap, else it is kept.

This file knows no arrays and no programs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe.capture.recompute import is_cheap
from jaxpipe.lower.flatten_update import ALL, Atom, Flattened, Step, arrives

HOME = -3  # the place where scalars of several devices are joined


@dataclass(frozen=True, eq=False)
class Part:
    """What ``place`` (a device or `HOME`) runs in ``phase``.

    ``steps``: step numbers in order. ``results``: (output number, atom). ``scalars``: values that
    leave the part in its packed vectors. ``kept``: arrays that a later part of this place reads.
    ``reads``: values made elsewhere, each with the part (place, phase) that sends it, or None for
    an input of the update. ``pins``: scalars with one array reader here and others elsewhere; the
    program gives them a second reader, for XLA divides by a scalar of one reader otherwise (it
    multiplies by the reciprocal), and the result would depend on how many leaves a device has.
    """

    place: int
    phase: int
    steps: tuple[int, ...]
    results: tuple[tuple[int, Atom], ...]
    scalars: tuple[int, ...]
    kept: tuple[int, ...]
    reads: tuple[tuple[int, tuple[int, int] | None], ...]
    pins: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Rounds:
    """Parts in an order in which they can run, and what is no part's work.

    ``last``: the last local phase. ``unchanged``: outputs that are inputs of the same place, as
    (output, input) pairs. ``on_device``: metrics that are made on that device.
    """

    parts: tuple[Part, ...]
    last: int
    unchanged: tuple[tuple[int, int], ...]
    on_device: dict[int, int] = field(default_factory=dict)


def divide(
    flat: Flattened, owners: tuple[int, ...], state_leaves: int, devices: int, home: int
) -> Rounds:
    """Divide a flattened update into parts.

    ``owners[i]`` for i < ``state_leaves``: where output i (a state leaf) is due. The outputs after
    those are metrics, due on the home device.
    """
    return _Divider(flat, owners, state_leaves, devices, home).rounds()


class _Divider:
    def __init__(
        self, flat: Flattened, owners: tuple[int, ...], state_leaves: int, devices: int, home: int
    ):
        self.flat = flat
        self.owners = owners
        self.readers = _readers(flat.steps)
        self.needs: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.runs: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.results: dict[tuple[int, int], list[tuple[int, Atom]]] = defaultdict(list)
        self.exports: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.source: dict[tuple[int, int], tuple[int, int]] = {}  # (value, place) -> its maker
        self.unchanged: list[tuple[int, int]] = []
        self.on_device: dict[int, int] = {}
        effects = [n for n, step in enumerate(flat.steps) if step.equation.effects]
        at_home = [int(flat.steps[n].place.home) for n in effects if self._is_joined(n)]
        self._demand_outputs(state_leaves, devices, home, least=max(at_home, default=1))
        self.effects = {n: self._effect(n, home) for n in effects}

    def rounds(self) -> Rounds:
        for number in reversed(range(len(self.flat.steps))):
            self._meet(number, self.flat.steps[number])
        for value in [v for v in self.needs if v < self.flat.inputs]:
            self._meet_input(value)
        keys = set(self.runs) | set(self.results) | set(self.exports)
        order = sorted(keys, key=lambda key: (key[1], key[0] == HOME, key[0]))
        return Rounds(
            tuple(self._part(*key) for key in order),
            self.last,
            tuple(self.unchanged),
            self.on_device,
        )

    # -- what is due where ---------------------------------------------------------------------

    def _demand_outputs(self, state_leaves: int, devices: int, home: int, *, least: int) -> None:
        places, outputs = self.flat.places, self.flat.outputs
        due: list[tuple[int, int]] = []  # (output, device)
        joined: list[int] = []  # metrics that home makes
        for o, atom in enumerate(outputs):
            if o < state_leaves:
                owner = self.owners[o]
                is_input = isinstance(atom, int) and atom < self.flat.inputs
                if is_input and self.owners[atom] == owner:
                    self.unchanged.append((o, atom))
                    continue
                due += [(o, d) for d in (range(devices) if owner == ALL else [owner])]
                continue
            place = places[atom] if isinstance(atom, int) else None
            if place is None or (place.device in (ALL, home) and place.local == 1):
                if isinstance(atom, int) and atom < self.flat.inputs:
                    self.unchanged.append((o, atom))
                else:
                    due.append((o, home))
            elif not place.small:
                due.append((o, place.device))
                self.on_device[o] = place.device
            else:
                joined.append(o)
        at_home = int(max((places[outputs[o]].home for o in joined), default=0))
        self.last = max(
            [least, at_home]
            + [int(arrives(places[a], d)) for o, d in due if isinstance(a := outputs[o], int)]
        )
        for o, device in due:
            self._result(o, device, self.last)
        for o in joined:
            self._result(o, HOME, at_home)

    def _result(self, output: int, place: int, phase: int) -> None:
        atom = self.flat.outputs[output]
        self.results[place, phase].append((output, atom))
        if isinstance(atom, int):
            self.needs[atom][place].add(phase)

    def _is_joined(self, number: int) -> bool:
        place = self.flat.steps[number].place
        return place.device == ALL and place.local > 1

    def _effect(self, number: int, home: int) -> tuple[int, int]:
        """An equation with an effect runs once, where it can."""
        place = self.flat.steps[number].place
        if self._is_joined(number):
            return HOME, int(place.home)
        return (home if place.device == ALL else place.device), max(self.last, int(place.local))

    # -- meeting demands, last step first ------------------------------------------------------

    def _meet(self, number: int, step: Step) -> None:
        runs: set[tuple[int, int]] = set()
        for value in step.outputs:
            if value not in self.needs:
                continue
            needs = self.needs[value]
            own = self._stays(value)
            for device in [d for d in needs if d not in (HOME, own)]:
                if self._comes_from_home(value, device):
                    self._ship(value, device)
            if HOME in needs:
                if own is None and self.flat.places[value].joined:
                    runs |= self._run(value, step, HOME)
                else:
                    self._send_home(value, self.flat.places[value].device, min(needs[HOME]))
            for device in needs:
                if device != HOME and (value, device) not in self.source:
                    runs |= self._run(value, step, device)
        if number in self.effects:
            runs.add(self.effects[number])
        for place, phase in runs:
            self.runs[place, phase].append(number)
            for value in _reads(self.flat, step):
                self.needs[value][place].add(phase)

    def _meet_input(self, value: int) -> None:
        owner, needs = self.owners[value], self.needs[value]
        if owner == ALL:
            return
        for device in [d for d in needs if d not in (HOME, owner)]:
            self._ship(value, device)
        if HOME in needs:
            self._send_home(value, owner, min(needs[HOME]))

    def _stays(self, value: int) -> int | None:
        """The device that makes a scalar for itself and others, if that is soon enough.

        The moments of a scalar parameter are made beside the parameter, not at home.
        """
        place, needs = self.flat.places[value], self.needs[value]
        if place.device == ALL or place.device not in needs or self.flat.avals[value].shape != ():
            return None
        at_home = needs.get(HOME, set()).union(
            phase - 1 for d in needs if d not in (HOME, place.device) for phase in needs[d]
        )
        return place.device if min(at_home, default=self.last) >= place.local else None

    def _comes_from_home(self, value: int, device: int) -> bool:
        place = self.flat.places[value]
        if self.flat.avals[value].shape != ():
            return False
        if place.device not in (ALL, device):
            return True
        if place.device != ALL and len(self.needs[value]) == 1:
            return False  # made of a scalar leaf of this device, and read nowhere else
        return place.local > 1 and place.joined and place.home < place.local

    def _ship(self, value: int, device: int) -> None:
        """Home sends the value to the device, which needs it."""
        phase = min(self.needs[value][device]) - 1
        self.needs[value][HOME].add(phase)
        self.source[value, device] = (HOME, phase)
        self.exports[HOME, phase].add(value)

    def _send_home(self, value: int, device: int, phase: int) -> None:
        self.needs[value][device].add(phase)
        self.source[value, HOME] = (device, phase)
        self.exports[device, phase].add(value)

    def _run(self, value: int, step: Step, place: int) -> set[tuple[int, int]]:
        """Where to run the step for the demands of ``place``; keeps what is not made again."""
        phases = sorted(self.needs[value][place])
        again = step.chooses is not None or is_cheap(step.equation)
        if place == HOME and self.flat.avals[value].shape == ():
            again = False  # it is sent packed with the rest
        if again or len(phases) == 1:
            return {(place, phase) for phase in phases}
        self.source[value, place] = (place, phases[0])
        self.exports[place, phases[0]].add(value)
        return {(place, phases[0])}

    # -- parts ---------------------------------------------------------------------------------

    def _part(self, place: int, phase: int) -> Part:
        steps = tuple(sorted(set(self.runs.get((place, phase), ()))))
        results = tuple(sorted(self.results.get((place, phase), ()), key=lambda r: r[0]))
        exports = sorted(self.exports.get((place, phase), ()))
        made = {v for number in steps for v in self.flat.steps[number].outputs}
        read: dict[int, None] = dict.fromkeys(exports)
        read.update((a, None) for _, a in results if isinstance(a, int))
        for number in steps:
            read.update(dict.fromkeys(_reads(self.flat, self.flat.steps[number])))
        outside = sorted(v for v in read if v not in made and v not in self.flat.constants)
        return Part(
            place,
            phase,
            steps,
            results,
            scalars=tuple(v for v in exports if self.flat.avals[v].shape == ()),
            kept=tuple(v for v in exports if self.flat.avals[v].shape != ()),
            reads=tuple((v, self._source(v, place)) for v in outside),
            pins=self._pins(steps, {*exports, *(a for _, a in results if isinstance(a, int))}),
        )

    def _pins(self, steps: tuple[int, ...], leaving: set[int]) -> tuple[int, ...]:
        mine = [self.flat.steps[n] for n in steps]
        readers = _readers(mine)
        read_by_arrays = {
            a
            for step in mine
            if not step.guard and any(self.flat.avals[v].shape for v in step.outputs)
            for a in step.inputs
            if isinstance(a, int) and self.flat.avals[a].shape == ()
        }
        return tuple(
            v
            for v in sorted(read_by_arrays - leaving)
            if readers[v] == 1 < self.readers[v] and v not in self.flat.constants
        )

    def _source(self, value: int, place: int) -> tuple[int, int] | None:
        if value < self.flat.inputs and self.owners[value] in (ALL, place):
            return None
        return self.source[value, place]


def _reads(flat: Flattened, step: Step) -> list[int]:
    atoms: list[Any] = [*step.inputs, *(flat.indices[c] for c, _ in step.guard)]
    return [a for a in atoms if isinstance(a, int)]


def _readers(steps: Sequence[Step]) -> Counter[int]:
    """How many steps read each value."""
    return Counter(a for step in steps for a in step.inputs if isinstance(a, int))
