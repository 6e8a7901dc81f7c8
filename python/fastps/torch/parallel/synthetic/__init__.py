"""Synthetic gradients: parts that do not wait for the parts above them, nor for their backward."""
