"""A device's instruction list with every lookup resolved: a flat list of closures over one array
list.

Each array that the device ever holds in a step has a *slot*, a fixed index into ``Tape.slots``:
parameters, constants, prologue results, accumulators, microbatches of the batch, and every value
of every microbatch. Executing an instruction then is: pick arguments by index, call the compiled
program, store results by index. A tape has three parts: *begin* (zero accumulators, prologues),
*body* (the instructions), and *end* (epilogues, and what the results of the step are made of).

This file knows how programs are called, and neither threads nor the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from jaxpipe.capture.ir import Stage, StageGraph
from jaxpipe.lower.compile import Callee, Role
from jaxpipe.lower.place import put_copy
from jaxpipe.runtime.transport import Channel, Transport
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.instructions import Accumulate, Free, Instruction, Recv, Run, Send

Op = Callable[[], None]
Origin = Instruction | str


@dataclass(eq=False)
class Tape:
    """What one device does in a step, ready to be walked.

    ``begin``, ``body``, ``end``: operations, each with the instruction (or a description) that it
    came from. ``params``: slots in the order of ``leaves``, flat parameter positions; ``batch``:
    for each position of the flat batch that the device reads, one slot per microbatch; ``results``:
    slots of the step's results by number of the output; ``gradients``: (stage, flat parameter
    position, slot). ``weight``: slot of the sum of weights.
    """

    device: int
    slots: list[Any] = field(default_factory=list)
    begin: list[tuple[Op, Origin]] = field(default_factory=list)
    body: list[tuple[Op, Origin]] = field(default_factory=list)
    end: list[tuple[Op, Origin]] = field(default_factory=list)
    leaves: tuple[int, ...] = ()
    params: tuple[int, ...] = ()
    batch: dict[int, range] = field(default_factory=dict)
    results: dict[int, int] = field(default_factory=dict)
    gradients: list[tuple[int, int, int]] = field(default_factory=list)
    weight: int = -1
    kept: frozenset[int] = frozenset()

    def clear(self) -> None:
        """Drop every array but constants."""
        kept = self.kept
        self.slots[:] = [a if i in kept else None for i, a in enumerate(self.slots)]


def make_tape(
    graph: StageGraph,
    instructions: Sequence[Instruction],
    device: int,
    programs: dict[Role, Callee],
    transport: Transport,
    shardings: Sequence[Any],
    *,
    microbatches: int,
    wait: bool,
) -> Tape:
    """Resolve ``instructions`` of ``device``.

    ``programs``: what `jaxpipe.lower.jobs.step_jobs` asked for, compiled. ``shardings``: of whole
    arrays on each device. ``wait``: let every program finish before the next instruction (where
    XLA would otherwise run ahead of the list and hold more than was planned).
    """
    assembler = _Assembler(graph, device, programs, transport, shardings, microbatches, wait)
    return assembler.assemble(instructions)


class _Assembler:
    """Gives out slots and writes a tape's operations; lives only while a tape is made."""

    def __init__(
        self,
        graph: StageGraph,
        device: int,
        programs: dict[Role, Callee],
        transport: Transport,
        shardings: Sequence[Any],
        microbatches: int,
        wait: bool,
    ) -> None:
        self.graph = graph
        self.programs = programs
        self.transport = transport
        self.shardings = shardings
        self.microbatches = microbatches
        self.wait = wait
        self.tape = Tape(device)
        self.resident: dict[int, list[int]] = {}
        self.sums: dict[int, range] = {}
        self.values: dict[tuple[int, int], range] = {}
        self.made: set[tuple[int, int]] = set()
        self.pending: dict[tuple[int, int], range] = {}
        self.unread: dict[tuple[int, int], Channel] = {}
        self.unreleased: dict[tuple[int, int], list[Channel]] = {}

    def assemble(self, instructions: Sequence[Instruction]) -> Tape:
        runs = [i.action for i in instructions if isinstance(i, Run)]
        stages = [self.graph.stages[s] for s in dict.fromkeys(a.stage for a in runs)]
        trained = [
            self.graph.stages[s] for s in dict.fromkeys(a.stage for a in runs if a.kind != "F")
        ]
        self._residents(stages)
        self._accumulators(trained)
        self._batch(runs)
        for instruction in instructions:
            self._instruction(instruction)
        for channels in self.unreleased.values():
            for channel in channels:
                self.tape.body.append((channel.released, "waiting for a transfer to leave"))
        self._results()
        self._scale(trained)
        for stage in trained:
            self._epilogue(stage)
        return self.tape

    # Slots.

    def _new(self, count: int) -> range:
        start = len(self.tape.slots)
        self.tape.slots.extend([None] * count)
        return range(start, start + count)

    def _residents(self, stages: list[Stage]) -> None:
        tape = self.tape
        tape.leaves = tuple(sorted({leaf for stage in stages for leaf in stage.params}))
        slots = self._new(len(tape.leaves))
        tape.params = tuple(slots)
        at = dict(zip(tape.leaves, slots, strict=True))
        constants: set[int] = set()
        for stage in stages:
            own = [at[leaf] for leaf in stage.params]
            fixed = self._new(len(stage.constants))
            for slot, array in zip(fixed, stage.constants, strict=True):
                tape.slots[slot] = put_copy(array, self.shardings[self.tape.device])
            constants.update(fixed)
            own += fixed
            if stage.prologue is not None:
                made = self._new(len(stage.resident_avals) - len(own))
                call = self.programs["prologue", stage.index]
                op = _call(tape.slots, call, own, made)
                tape.begin.append((op, f"the prologue of stage {stage.index} ({stage.lines})"))
                own += made
            self.resident[stage.index] = own
        tape.kept = frozenset(constants)

    def _accumulators(self, trained: list[Stage]) -> None:
        zeros = self.programs.get(("zeros", tuple(s.index for s in trained)))
        if zeros is None:
            self.sums = {stage.index: range(0) for stage in trained}
            return
        every = self._new(sum(len(s.accumulate) for s in trained))
        start = every.start
        for stage in trained:
            self.sums[stage.index] = range(start, start + len(stage.accumulate))
            start += len(stage.accumulate)
        self.tape.begin.insert(0, (_call(self.tape.slots, zeros, [], every), "zero accumulators"))

    def _batch(self, runs: list[Action]) -> None:
        read: set[int] = set()
        for action in runs:
            spec = self.graph.stages[action.stage].passes.get(action.kind)
            read.update(spec.batch if spec else ())
        for position in sorted(read):
            self.tape.batch[position] = self._new(self.microbatches)

    # Instructions.

    def _instruction(self, instruction: Instruction) -> None:
        match instruction:
            case Run():
                self._run(instruction)
            case Send(value, microbatch, to):
                self._read(value, microbatch, instruction)
                channel = self._channel(value, microbatch, self.tape.device, to)
                slots = self.tape.slots
                part = _part(self.values[value, microbatch])
                offer = channel.offer
                self._add(lambda: offer(slots[part]), instruction)
                self.unreleased.setdefault((value, microbatch), []).append(channel)
            case Recv(value, microbatch, source):
                channel = self._channel(value, microbatch, source, self.tape.device)
                self.values[value, microbatch] = self._new(len(self.graph.bundles[value]))
                self._add(channel.post, instruction)
                self.unread[value, microbatch] = channel
            case Free(value, microbatch):
                self._read(value, microbatch, instruction)
                self._release(value, microbatch, instruction)
                self._add(_drop(self.tape.slots, [self.values[value, microbatch]]), instruction)
            case Accumulate(stage, microbatch):
                held = self.pending.pop((stage, microbatch))
                sums = self.sums[stage]
                if sums:
                    call = self.programs["add", stage]
                    self._add(
                        _call(
                            self.tape.slots, call, [*sums, *held], sums, drop=[held], wait=self.wait
                        ),
                        instruction,
                    )

    def _run(self, run: Run) -> None:
        action = run.action
        spec = self.graph.stages[action.stage].passes.get(action.kind)
        if spec is None:
            return
        for value in spec.reads:
            self._read(value, action.microbatch, run)
        for value in run.reuse:
            self._release(value, action.microbatch, run)
        sums = self.sums[action.stage] if spec.accumulators else range(0)
        gradients = sums
        if spec.accumulators and not run.accumulate:
            gradients = self._new(len(sums))
            self.pending[action.stage, action.microbatch] = gradients
        resident = self.resident[action.stage]
        arguments = list(sums) if run.accumulate else []
        arguments += [resident[i] for i in spec.resident]
        arguments += [self.tape.batch[i][action.microbatch] for i in spec.batch]
        for value in spec.reads:
            arguments += self.values[value, action.microbatch]
        made = self._new(sum(len(self.graph.bundles[value]) for value in spec.writes))
        start = made.start
        for value in spec.writes:
            stop = start + len(self.graph.bundles[value])
            self.values[value, action.microbatch] = range(start, stop)
            self.made.add((value, action.microbatch))
            start = stop
        role = ("run", action.stage, action.kind, run.reuse, run.accumulate)
        self._add(
            _call(
                self.tape.slots,
                self.programs[role],
                arguments,
                made,
                first=gradients,
                drop=[self.values[value, action.microbatch] for value in run.reuse],
                wait=self.wait,
            ),
            run,
        )

    def _add(self, op: Op, origin: Origin) -> None:
        self.tape.body.append((op, origin))

    def _channel(self, value: int, microbatch: int, source: int, to: int) -> Channel:
        return self.transport.channel((value, microbatch, source, to), self.shardings[to])

    def _read(self, value: int, microbatch: int, origin: Origin) -> None:
        """Before the first use of a received value: wait for it and put it into its slots."""
        channel = self.unread.pop((value, microbatch), None)
        if channel is not None:
            self._add(_take(self.tape.slots, channel, self.values[value, microbatch]), origin)

    def _release(self, value: int, microbatch: int, origin: Origin) -> None:
        """Before the buffers of a value go: wait until the transfers that read it are done."""
        for channel in self.unreleased.pop((value, microbatch), ()):
            self._add(channel.released, origin)

    # The end of a step.

    def _results(self) -> None:
        """Join the outputs that were made here, of all microbatches, and drop them."""
        own = [
            (number, value, position)
            for number, (value, position) in enumerate(self.graph.outputs)
            if (value, 0) in self.made
        ]
        if not own:
            return
        arguments = [
            self.values[value, microbatch][position]
            for _, value, position in own
            for microbatch in range(self.microbatches)
        ]
        made = self._new(len(own))
        values = dict.fromkeys(value for _, value, _ in own)
        drop = [self.values[value, i] for value in values for i in range(self.microbatches)]
        op = _call(self.tape.slots, self.programs[("join",)], arguments, made, drop=drop)
        self.tape.body.append((op, "joining the outputs of microbatches"))
        for (number, _, _), slot in zip(own, made, strict=True):
            self.tape.results[number] = slot

    def _scale(self, trained: list[Stage]) -> None:
        stages = tuple(stage.index for stage in trained)
        scale = self.programs.get(("scale", stages))
        if scale is None:
            return
        self.tape.weight = self._new(1)[0]
        sums = [slot for stage in trained for slot in self.sums[stage.index]]
        op = _call(self.tape.slots, scale, [self.tape.weight, *sums], range(sums[0], sums[-1] + 1))
        self.tape.end.append((op, "dividing gradients by the sum of weights"))

    def _epilogue(self, stage: Stage) -> None:
        slots = self.sums[stage.index]
        if stage.epilogue is not None:
            count = len(stage.params) + len(stage.constants)
            made = self._new(len(stage.grad_params))
            op = _call(
                self.tape.slots,
                self.programs["epilogue", stage.index],
                [*self.resident[stage.index][:count], *slots],
                made,
                drop=[slots],
            )
            self.tape.end.append((op, f"the epilogue of stage {stage.index} ({stage.lines})"))
            slots = made
        for leaf, slot in zip(stage.grad_params, slots, strict=True):
            self.tape.gradients.append((stage.index, leaf, slot))


def _part(slots: range) -> slice:
    return slice(slots.start, slots.stop)


def _pick(indices: Sequence[int]) -> Callable[[list[Any]], Any]:
    if len(indices) > 1:
        return itemgetter(*indices)
    if indices:
        only = indices[0]
        return lambda slots: (slots[only],)
    return lambda slots: ()


def _take(slots: list[Any], channel: Channel, into: range) -> Op:
    part, take = _part(into), channel.take

    def op() -> None:
        slots[part] = take()

    return op


def _drop(slots: list[Any], ranges: Sequence[range]) -> Op:
    (only,) = ranges
    part, empty = _part(only), (None,) * len(only)

    def op() -> None:
        slots[part] = empty

    return op


def _call(
    slots: list[Any],
    call: Callee,
    arguments: Sequence[int],
    results: range,
    *,
    first: range = range(0),
    drop: Sequence[range] = (),
    wait: bool = False,
) -> Op:
    """``first + results = call(arguments)``, then forget the slots ``drop``."""
    pick = _pick(arguments)
    count = len(first)
    head, tail = _part(first), _part(results)
    gone = [(_part(r), (None,) * len(r)) for r in drop]
    wait = wait and bool(count or len(results))

    def op() -> None:
        made = call(*pick(slots))
        if count:
            slots[head] = made[:count]
            slots[tail] = made[count:]
        else:
            slots[tail] = made
        for part, empty in gone:
            slots[part] = empty
        if wait:
            made[-1].block_until_ready()

    return op
