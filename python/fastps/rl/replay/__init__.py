"""Memories of transitions that a learner draws from: one of a process, or one on the servers."""
