"""A worker's counters of its pushes."""

from types import SimpleNamespace

from fastps.errors import Lost
from fastps.worker.tally import Tally


def test_a_push_lost_on_two_shards_counts_once_whenever_it_is_noticed():
    first, second = Lost("w", 0, 2, 5, 3), Lost("w", 1, 2, 5, 3)
    together, apart = Tally(), Tally()
    together.lose([first, second])
    apart.lose([first])
    apart.lose([second])
    assert together.lost == apart.lost == {"w": 2}
    apart.lose([first, Lost("v", 1, None, 5, 3)])
    assert apart.lost == {"w": 4, "v": 0}


def test_a_step_with_several_pushes_has_the_largest_staleness_and_the_smallest_scale_and_momentum():
    tally = Tally()
    for staleness, scale, momentum in ((1, 0.5, None), (4, 0.25, 0.5), (2, 1.0, 0.9)):
        receipts = SimpleNamespace(bytes=8, staleness=staleness, scale=scale, momentum=momentum)
        tally.acknowledge(("w",), receipts)
    assert tally.acknowledged == (4, 24, 0.25, 0.5)
    assert tally.totals()["momentum"] == 0.9
    assert tally.stats(["w"])["scaled"] == 2
