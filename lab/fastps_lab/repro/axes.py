"""Labels of logarithmic axes: 60 and 40 instead of powers of ten."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["label_plainly"]

#: Decades beyond which powers of ten are easier to read than numbers.
_MOST = 4.5
#: Decades up to which an axis has these multiples of the powers of ten.
_MULTIPLES = ((0.8, (1, 1.5, 2, 3, 4, 5, 6, 8)), (1.6, (1, 2, 4, 6)), (2.6, (1, 2, 5)), (_MOST, (1,)))


def label_plainly(axes: Any) -> None:
    """Labels the logarithmic axes of a finished plot with plain numbers, unless they have their own labels.

    Args:
        axes: Axes of matplotlib, with all that they show: the labels follow from the range.
    """
    for axis in (axes.xaxis, axes.yaxis):
        _label(axis)


def _label(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, SymmetricalLogLocator

    locator = axis.get_major_locator()
    if isinstance(locator, LogLocator):
        low, high = sorted(axis.get_view_interval())
        decades = math.log10(high / low)
        if decades > _MOST:
            return
        if axis.get_transform().base == 10:
            multiples = next(own for most, own in _MULTIPLES if decades <= most)
            axis.set_major_locator(LogLocator(subs=multiples))
            axis.set_minor_locator(NullLocator())
    elif not isinstance(locator, SymmetricalLogLocator):
        return
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_formatter(NullFormatter())
