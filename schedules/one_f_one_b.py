"""1F1B: one forward, one backward, in turns (PipeDream-Flush, arXiv 2006.09503; Megatron-LM)."""

from jaxpipe.scheduling import B, F, schedule


@schedule(name="1f1b")
def one_f_one_b(device, devices, microbatches):
    """As fast as `gpipe`, but a microbatch is let go as soon as its backward can run.

    Device d warms up with P - 1 - d forwards, then alternates, then drains.
    Makespan and span (M + P - 1)(F + B); device d holds min(M, P - d) microbatches at its peak.

    >>> print(one_f_one_b(devices=2, microbatches=3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> one_f_one_b(devices=4, microbatches=8).simulate()
    Timeline(1f1b, 4 devices, 8 microbatches: makespan 33, span 33, bubble 27.3 %, peak 4 3 2 1)
    """
    warmup = min(microbatches, devices - 1 - device)
    for i in range(warmup):
        yield F(i)
    for i in range(microbatches - warmup):
        yield F(warmup + i)
        yield B(i)
    for i in range(microbatches - warmup, microbatches):
        yield B(i)
