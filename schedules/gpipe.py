"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from jaxpipe.scheduling import B, F, schedule


@schedule
def gpipe(device, devices, microbatches):
    """All forwards, then all backwards: the simplest order, and the one that holds most.

    With F and B a device's times for one microbatch, P devices and M microbatches:
    makespan and span (M + P - 1)(F + B); every device holds M microbatches at its peak.

    >>> print(gpipe(devices=2, microbatches=3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2
    >>> gpipe(devices=4, microbatches=8).simulate().makespan
    33.0
    """
    for i in range(microbatches):
        yield F(i)
    for i in range(microbatches):
        yield B(i)
