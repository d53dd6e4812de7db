"""The single-threaded walk: the same tapes, one instruction at a time, in the plan's own order.

For tests and for looking closely: after each instruction `walk` calls back, so that what devices
hold can be compared with what the plan says. This file knows no threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import jax

from jaxpipe.runtime.execute import Engine
from jaxpipe.scheduling.instructions import Instruction

After = Callable[[int, int, Instruction], None]


def walk(engine: Engine, after: After) -> None:
    """Run a loaded step in ``plan.walk`` order, without its end.

    ``after(device, index, instruction)`` is called when instruction ``index`` of ``device`` has
    been executed. Results are left in the engine's slots.
    """
    for tape in engine.tapes:
        for op, _ in tape.begin:
            op()
    bodies = [deque(tape.body) for tape in engine.tapes]
    for device, index in engine.plan.walk:
        instruction = engine.plan.lists[device][index]
        body = bodies[device]
        while body and body[0][1] is instruction:
            body.popleft()[0]()
        after(device, index, instruction)
    for body in bodies:
        for op, _ in body:
            op()


def live_bytes(devices: int, device_of: dict[jax.Device, int]) -> list[int]:
    """Bytes of all live arrays of this process, by pipeline device.

    Touching ``addressable_shards`` makes arrays live; this does not.
    """
    held = [0] * devices
    for array in jax.live_arrays():
        for chip in array.sharding.device_set:
            if chip in device_of:
                shape = array.sharding.shard_shape(array.shape)
                size = 1
                for extent in shape:
                    size *= extent
                held[device_of[chip]] += size * array.dtype.itemsize
    return held
