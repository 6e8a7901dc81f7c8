"""The laboratory of fastps: what studies it, teaches it and tortures it, over its public names.

Its commands are those of ``fastps-lab``; `cli` has their parser, and each has a folder here.
"""
