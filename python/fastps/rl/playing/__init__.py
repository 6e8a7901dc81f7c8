"""Environments and models: playing by a policy, and what the steps are worth."""
