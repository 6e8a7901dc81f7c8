"""Measured costs, which virtual runs read."""
