"""A schedule of one's own, from the idea to a check, a picture and training.

The idea: 1F1B keeps each device's warm-up as short as it can, and so every transfer between two
devices is waited for. With twice the warm-up a device has a spare microbatch to work on while a
transfer is on its way, at the price of more activations in memory (the overlap-friendly 1F1B of
Alpa, arXiv 2211.05322).

    python examples/my_schedule.py                                  # check, compare, draw
    jaxpipe demo --schedule=examples/my_schedule.py                 # train through it
"""

from absl import app, flags

import jaxpipe as jp
from jaxpipe import B, F

DEVICES = flags.DEFINE_integer("devices", 4, "Devices of the pipeline.", lower_bound=1)
MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches per step.", lower_bound=1)
PICTURE = flags.DEFINE_string("picture", "my_schedule.svg", "Where to draw the timeline.")


@jp.schedule
def patient_1f1b(device, devices, microbatches):
    """1F1B with twice the warm-up: device d holds up to min(M, 2(P - d) - 1) microbatches."""
    warmup = min(microbatches, 2 * (devices - 1 - device))
    for i in range(warmup):
        yield F(i)
    for i in range(microbatches - warmup):
        yield F(warmup + i)
        yield B(i)
    for i in range(microbatches - warmup, microbatches):
        yield B(i)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    sizes = {"devices": DEVICES.value, "microbatches": MICROBATCHES.value}

    # Check. Calling it proves it complete and free of deadlock, or says what is wrong.
    mine = patient_1f1b(**sizes)
    print(mine)  # one line per device
    print(format(mine, "grid"))  # over time, with F = I = W = 1

    # Compare, with transfers that take half as long as a forward.
    costs = jp.Costs(F=1, I=1, W=1, latency=0.5)
    library = jp.schedules.get("1f1b")(**sizes)
    for schedule in (library, mine):
        print(f"{schedule.name}:\n{schedule.simulate(costs)}")

    # Draw, and save in a form that other programs read.
    mine.simulate(costs).save(PICTURE.value)
    print(f"drawn in {PICTURE.value}")


if __name__ == "__main__":
    app.run(main)
