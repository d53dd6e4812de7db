"""Interleaved 1F1B: several chunks on each device (Megatron-LM, arXiv 2104.04473)."""

from jaxpipe.scheduling import B, F, placements, schedule


@schedule(placement=placements.loop)
def interleaved(device, devices, microbatches, chunks=2):
    """1F1B over ``chunks`` stages per device: the bubble shrinks by that factor.

    Stage s is on device s mod P. Microbatches go in rounds of P: a device runs a round through
    its first chunk, then the same round through its next one; backwards likewise, last chunk
    first. For v chunks and M a multiple of P: makespan and span M(F + B) + (P - 1)(F + B)/v.
    For any other M the order is that of the next multiple without the microbatches >= M.
    Device d holds at most min(Mv, (v - 1)P + 2(P - 1 - d) + 1) chunks.

    >>> print(interleaved(devices=2, microbatches=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    >>> interleaved(devices=4, microbatches=8, chunks=2).simulate().makespan
    28.5
    """
    rounds = -(-microbatches // devices)
    forwards = [
        F(r * devices + i, chunk=c)
        for r in range(rounds) for c in range(chunks) for i in range(devices)
    ]  # fmt: skip
    backwards = [
        B(r * devices + i, chunk=c)
        for r in range(rounds) for c in reversed(range(chunks)) for i in range(devices)
    ]  # fmt: skip
    warmup = min(len(forwards), (chunks - 1) * devices + 2 * (devices - 1 - device))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - warmup :]
    return [action for action in order if action.microbatch < microbatches]
