"""``fastps-lab repro``: published claims about distributed training, checked by runs of the real store.

Each claim says who makes it, how it is run, when it holds, and draws a picture of what was measured.
"""
