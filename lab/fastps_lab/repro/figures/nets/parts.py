"""Sizes of the nets in parts, which the figure and its measurement share."""

from __future__ import annotations

__all__ = ["BATCH", "CHANNELS", "LAYERS", "NETS", "PARTS", "SIDE"]

#: Nets by name: the width of their fully connected layers; of the locally connected one, the image's.
NETS = {"dense, 512": 512, "dense, 2,048": 2048, "local": 64}
LAYERS, BATCH = 4, 64
#: The locally connected net: channels, and the side of its images.
CHANNELS, SIDE = 8, 64
#: Numbers of parts.
PARTS = (1, 2, 4, 8, 16)
