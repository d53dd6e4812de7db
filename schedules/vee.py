"""Zero bubble on a V: each device holds a first and a last chunk (Qi et al., arXiv 2405.15362)."""

from functools import partial

from jaxpipe.scheduling import F, I, W, fastest, greedy, placements


def as_much_as_1f1b(device, devices):
    """Chunks in flight: two for each device, which is what 1F1B's first device holds."""
    return 2 * devices


def for_way_back(device, devices):
    """Of these, what second chunks can count on: the more, the later they are freed again."""
    return device + 1


on_a_vee = partial(
    greedy, in_flight=as_much_as_1f1b, reserve=for_way_back, placement=placements.vee
)

# Taking turns between its two chunks (for a few sizes: between F and I), and forwards before
# backwards where both can run, a device is never idle after its first action if all times are
# equal. Where transfers take time or stages differ, backwards first is often better.
in_turns = on_a_vee(prefer=(F, I, W), ties=("turns", "alternate"))
backward_first = on_a_vee(prefer=(I, F, W), ties=("deepest", "oldest"))

zb_v = fastest(
    in_turns,
    backward_first,
    name="zb_v",
    doc="""Down the devices and back up: nearly no bubble within 1F1B's memory.

    Device d holds stages d and 2P - 1 - d, takes turns between them, and runs W when nothing else
    is ready. At F = I = W the makespan is M(F + I + W) + (P - 1)F/2 for M >= P, with F a device's
    time for one microbatch through both its chunks. Every device holds at most 2P chunks, which
    is what `1f1b` holds. (The paper writes B for our I.)

    ``costs``: where given, order for them; the result is never slower than that for equal times.

    >>> print(zb_v(devices=2, microbatches=2))
    0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
    1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 2W1 1W0 1W1
    >>> zb_v(devices=4, microbatches=8).simulate().makespan
    25.5
    """,
)
