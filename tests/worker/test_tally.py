"""A worker's counters of its pushes."""

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
