"""Zero bubble on a line: backward for inputs first, weights later (Qi et al., arXiv 2401.10241)."""

from jaxpipe.scheduling import F, I, W, fastest, greedy, schedule


@schedule
def textbook_zb_h1(device, devices, microbatches):
    """The order of `zb_h1` for equal F, I and W, spelt out."""
    warmup = min(microbatches, devices - 1 - device)
    for i in range(warmup):
        yield F(i)
    for i in range(microbatches):
        if warmup + i < microbatches:
            yield F(warmup + i)
        yield I(i)
        if i >= device:
            yield W(i - device)
    for i in range(max(0, microbatches - device), microbatches):
        yield W(i)


filling = greedy(prefer=(I, F, W), in_flight=lambda device, devices: devices)

zb_h1 = fastest(
    textbook_zb_h1,
    filling,
    name="zb_h1",
    doc="""1F1B with the weights' backward put off: it fills the bubble, within 1F1B's memory.

    Device d runs the W of microbatch k - d after the I of microbatch k. At F = I = W makespan and
    span are M(F + I + W) + (P - 1)(F + I - W), for M >= P; every device holds at most P
    microbatches. (The paper writes B for our I.)

    ``costs``: where given, list scheduling under these costs is tried too, and the faster kept.

    >>> print(zb_h1(devices=2, microbatches=3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    >>> zb_h1(devices=4, microbatches=8).simulate()
    Timeline(zb_h1, 4 devices, 8 microbatches: makespan 27, span 27, bubble 11.1 %, peak 4 4 4 4)
    """,
)
