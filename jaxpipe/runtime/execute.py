"""Running a step: every device's tape walked by that device's thread.

`Engine` owns what lives from step to step: the tapes (with their array slots), the transport and
the worker threads. A step is *load* (parameters and the cut batch into slots), one or more *phases*
(all tapes walked at once), and reading results out of slots; then every slot is cleared.

The first exception in any thread breaks the phase off everywhere: no thread starts another
operation, and those that wait in a transfer wake up. It reaches the caller as a `PipelineError`
that names stage, action, microbatch, device and model source line. So does a KeyboardInterrupt in
the caller, as itself. This file knows no optimizers and no trees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jax

from jaxpipe.capture.ir import StageGraph
from jaxpipe.errors import PipelineError, error_in_words
from jaxpipe.lower.compile import Callee, Executables
from jaxpipe.lower.jobs import is_cut
from jaxpipe.lower.microbatch import Axes
from jaxpipe.lower.place import Layout, on_device
from jaxpipe.runtime.checks import under_callers_checks
from jaxpipe.runtime.tape import Op, Origin, make_tape
from jaxpipe.runtime.transport import Cancelled, Transport
from jaxpipe.runtime.workers import Workers
from jaxpipe.scheduling.instructions import Accumulate, Free, Instruction, Plan, Recv, Run, Send

Phase = Sequence[Sequence[tuple[Op, Origin]]]  # per device


@dataclass(frozen=True)
class _Failure:
    device: int
    origin: Origin
    error: BaseException


class Engine:
    """Runs one compiled pipeline, one step at a time.

    ``wait``: let every program finish before the next instruction of its device (CPU, where XLA
    would else run ahead and hold more memory than planned).
    """

    def __init__(
        self,
        graph: StageGraph,
        plan: Plan,
        layout: Layout,
        executables: Executables,
        workers: Workers,
        transport: Transport,
        *,
        axes: Axes,
        wait: bool,
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.layout = layout
        self.axes = axes
        self.workers = workers
        self.transport = transport
        self.lock = threading.Lock()
        self.tapes = tuple(
            make_tape(
                graph,
                instructions,
                device,
                executables.by_role[device],
                transport,
                layout.replicated,
                microbatches=plan.schedule.microbatches,
                wait=wait,
            )
            for device, instructions in enumerate(plan.lists)
        )
        self._cutters: tuple[Callee | None, ...] = tuple(
            roles.get(("cut",)) for roles in executables.by_role
        )
        self._begin_and_body = _compiled_phase([[*t.begin, *t.body] for t in self.tapes])
        self._end = _compiled_phase([t.end for t in self.tapes])
        self._whole = _compiled_phase([[*t.begin, *t.body, *t.end] for t in self.tapes])
        self.weighted = any(t.weight >= 0 for t in self.tapes)
        self._sound = True  # nothing of an earlier phase is under way or left in channels

    def load(self, params: Sequence[jax.Array], batch: Sequence[Any]) -> None:
        """Put placed parameters, and the batch cut into microbatches, into the devices' slots."""
        if not self._sound:  # a step was broken off, and the mending after it too
            self._mend()
        for tape, cutter in zip(self.tapes, self._cutters, strict=True):
            slots = tape.slots
            for leaf, slot in zip(tape.leaves, tape.params, strict=True):
                slots[slot] = on_device(self.layout, leaf, params[leaf], tape.device)
            if not tape.batch:
                continue
            whole = jax.device_put(
                [batch[position] for position in tape.batch], self.layout.replicated[tape.device]
            )
            pieces = []
            for position, array in zip(tape.batch, whole, strict=True):
                if is_cut(position, self.axes):
                    pieces.append(array)
                else:
                    for slot in tape.batch[position]:
                        slots[slot] = array
            if cutter is None:
                continue
            blocks = iter(cutter(*pieces))
            for position, into in tape.batch.items():
                if is_cut(position, self.axes):
                    for slot in into:
                        slots[slot] = next(blocks)

    def run(self, weight: Callable[[], Sequence[jax.Array]] | None = None) -> None:
        """Walk all tapes. ``weight()``, called between body and end, gives the sum of weights on
        each device; without it body and end are walked in one go.
        """
        if weight is None or not self.weighted:
            self.phase(self._whole if weight is None else self._begin_and_body)
            return
        self.phase(self._begin_and_body)
        for tape, scalar in zip(self.tapes, weight(), strict=True):
            if tape.weight >= 0:
                tape.slots[tape.weight] = scalar
        self.phase(self._end)

    def results(self) -> dict[int, jax.Array]:
        """Joined outputs by number, each on the device that made it."""
        return {
            number: tape.slots[slot] for tape in self.tapes for number, slot in tape.results.items()
        }

    def gradients(self) -> dict[int, list[tuple[int, int, jax.Array]]]:
        """By flat parameter position: (stage, device, weight gradient), in order of stages."""
        found: dict[int, list[tuple[int, int, jax.Array]]] = {}
        for tape in self.tapes:
            for stage, leaf, slot in tape.gradients:
                found.setdefault(leaf, []).append((stage, tape.device, tape.slots[slot]))
        for parts in found.values():
            parts.sort(key=lambda part: part[0])
        return found

    def clear(self) -> None:
        """Drop all arrays of the step."""
        for tape in self.tapes:
            tape.clear()

    def phase(self, phase: _CompiledPhase) -> None:
        """Walk one list of operations per device, each in its thread; returns when all are done."""
        broken: list[bool] = [False]
        done: SimpleQueue[_Failure | None] = SimpleQueue()  # of this phase alone
        failures: list[_Failure] = []
        self._sound = False
        try:
            self.workers.submit(
                [
                    under_callers_checks(
                        _walker(device, ops, origins, broken, self.transport, done)
                    )
                    for device, (ops, origins) in enumerate(phase)
                ]
            )
            for _ in phase:
                failure = done.get()
                if failure is not None:
                    failures.append(failure)
        except BaseException:  # KeyboardInterrupt: break off, then let it through
            broken[0] = True
            self._mend()
            raise
        if failures:
            self._mend()
            first = failures[0]
            raise PipelineError(self._describe(first)) from first.error
        self._sound = True

    def _mend(self) -> None:
        """Make the engine fit for the next step after one that was broken off."""
        self.transport.cancel()
        self.workers.settle()
        self.transport.reset()
        self.clear()
        self._sound = True

    def refuse_reentry(self) -> None:
        """Raise `PipelineError` where a step of this pipeline is under way in the calling thread.

        That is a callback within a stage, which may be called by a thread of ours or of XLA's own:
        it would wait for the step that waits for it.
        """
        thread = threading.current_thread()
        of_xla = isinstance(thread, threading._DummyThread) and self.lock.locked()
        if of_xla or self.workers.serves(thread):
            raise PipelineError(
                "a pipelined function was called by a callback within one of its own stages, whose "
                "step would wait for the callback and the callback for the step. Call the plain "
                "function, .reference, or another pipeline there."
            )

    def _describe(self, failure: _Failure) -> str:
        origin = failure.origin
        what = origin if isinstance(origin, str) else describe(origin, self.graph)
        return (
            f"Device {failure.device} failed at {what}: {error_in_words(failure.error)} "
            "The step was cancelled on all devices."
        )


_CompiledPhase = tuple[tuple[tuple[Op, ...], tuple[Origin, ...]], ...]


def _compiled_phase(phase: Phase) -> _CompiledPhase:
    return tuple((tuple(op for op, _ in ops), tuple(origin for _, origin in ops)) for ops in phase)


def _walker(
    device: int,
    ops: tuple[Op, ...],
    origins: tuple[Origin, ...],
    broken: list[bool],
    transport: Transport,
    done: SimpleQueue[_Failure | None],
) -> Callable[[], None]:
    def walk() -> None:
        position = -1
        failure = None
        try:
            for op in ops:
                if broken[0]:
                    break
                position += 1
                op()
        except Cancelled:
            pass
        except BaseException as error:  # reported to the caller, whatever it is
            if not broken[0]:
                broken[0] = True
                failure = _Failure(device, origins[position], error)
                transport.cancel()
        done.put(failure)

    return walk


def describe(instruction: Instruction, graph: StageGraph) -> str:
    """An instruction in words, with the model's source line."""
    values = graph.graph.values
    match instruction:
        case Run(action):
            stage = graph.stages[action.stage]
            return (
                f"{action} ({_KINDS[action.kind]} of stage {action.stage}, microbatch "
                f"{action.microbatch}; {stage.lines})"
            )
        case Send(value, microbatch, to):
            return f"sending {values[value].name}, microbatch {microbatch}, to device {to}"
        case Recv(value, microbatch, source):
            return f"receiving {values[value].name}, microbatch {microbatch}, from device {source}"
        case Accumulate(index, microbatch):
            stage = graph.stages[index]
            return (
                f"adding the weight gradients of stage {index}, microbatch {microbatch} "
                f"({stage.lines})"
            )
        case Free(value, microbatch):
            return f"freeing {values[value].name}, microbatch {microbatch}"


_KINDS = {
    "F": "the forward",
    "B": "the backward",
    "I": "the backward for inputs",
    "W": "the backward for weights",
}
