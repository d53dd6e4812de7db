"""Grouping of segments into stages: optimal, total, and explained where it cannot be done."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.capture.trace import Segment
from jaxpipe.errors import PipelineError
from jaxpipe.plan import balance, group


def segments(costs):
    return [Segment(i, f"model.py:{10 + i}", f"block{i}", c) for i, c in enumerate(costs)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_balance_finds_the_least_largest_cost_with_the_earliest_cuts(costs, data):
    parts = data.draw(st.integers(1, len(costs)))

    def largest(sizes):
        ends = list(itertools.accumulate(sizes))
        return max(sum(costs[e - s : e]) for s, e in zip(sizes, ends, strict=True))

    cuts = itertools.combinations(range(1, len(costs)), parts - 1)
    options = [tuple(b - a for a, b in itertools.pairwise((0, *c, len(costs)))) for c in cuts]
    least = min(map(largest, options))
    assert balance(costs, parts) == min(o for o in options if largest(o) == least)


def test_as_many_segments_as_stages_map_one_to_one():
    assert group(segments([5, 1, 1]), 3) == (1, 1, 1)


def test_explicit_counts_are_taken_as_they_are():
    assert group(segments([1] * 8), 4, explicit=[3, 2, 2, 1]) == (3, 2, 2, 1)


def test_too_few_segments_names_both_numbers_the_segments_and_the_remedy():
    with pytest.raises(PipelineError) as error:
        group(segments([1, 1]), 4)
    text = str(error.value)
    assert "4 stages" in text and "2 segments (1 stage_boundary marks)" in text
    assert "segment 1 (block1): model.py:11" in text and "Mark at least 3 places" in text


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([2, 2], "lists 2 stages but the schedule wants 3"),
        ([2, 2, 2], "sums to 6 but the model has 5 segments"),
        ([5, 0, 0], "positive whole numbers"),
        ([], "positive whole numbers"),
    ],
)
def test_explicit_counts_that_do_not_fit_are_refused(counts, words):
    with pytest.raises(PipelineError, match=words):
        group(segments([1] * 5), 3, explicit=counts)
