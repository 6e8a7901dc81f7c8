"""Nets that are trained or measured."""
