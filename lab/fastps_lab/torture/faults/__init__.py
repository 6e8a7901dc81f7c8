"""Faults of servers and of the connections to them."""
