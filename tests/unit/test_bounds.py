"""Lower bounds: the heaviest clique, alignment only as far as it is valid, pins."""

from __future__ import annotations

from planner.bounds import bottleneck, lower_bound, peak_live
from planner.problem import Lifetime, Problem


def test_nothing_is_alive_in_an_empty_problem() -> None:
    assert lower_bound(Problem(())) == 0
    assert bottleneck(Problem(())).names == ()


def test_peak_live_is_the_first_step_with_most_bytes() -> None:
    lifetimes = (Lifetime("a", 4, 0, 3), Lifetime("b", 5, 2, 6), Lifetime("c", 4, 5, 9))
    assert peak_live(lifetimes) == (9, 2)


def test_lifetimes_that_touch_are_not_alive_together() -> None:
    assert lower_bound(Problem((Lifetime("a", 4, 0, 3), Lifetime("b", 5, 3, 6)))) == 5


def test_bottleneck_names_the_largest_first() -> None:
    lifetimes = (Lifetime("small", 1, 0, 9), Lifetime("large", 8, 4, 5), Lifetime("elsewhere", 2, 6, 7))
    found = bottleneck(Problem(lifetimes), count=2)
    assert (found.step, found.live_nbytes, found.names) == (4, 9, ("large", "small"))


def test_the_topmost_storage_needs_no_padding() -> None:
    lifetimes = tuple(Lifetime(name, 1, 0, 1, alignment=256) for name in "abc")
    assert lower_bound(Problem(lifetimes)) == 513


def test_the_largest_padding_is_the_one_given_back() -> None:
    lifetimes = (Lifetime("a", 3, 0, 1, alignment=4), Lifetime("b", 5, 0, 1, alignment=4))
    assert lower_bound(Problem(lifetimes)) == 9  # a below, padded to 4, then b


def test_padding_is_not_counted_where_a_small_storage_can_use_it() -> None:
    lifetimes = (Lifetime("a", 1, 0, 1, alignment=256), Lifetime("b", 255, 0, 1), Lifetime("c", 256, 0, 1, 256))
    assert lower_bound(Problem(lifetimes)) == 512


def test_the_end_of_a_pinned_storage_is_a_bound() -> None:
    assert lower_bound(Problem((Lifetime("a", 1, 0, 1, offset=99), Lifetime("b", 1, 0, 1)))) == 100


def test_large_sizes_add_up_exactly() -> None:
    lifetimes = tuple(Lifetime(str(i), 2**62 + 1, 0, 1) for i in range(9))
    assert lower_bound(Problem(lifetimes)) == 9 * (2**62 + 1)
