"""The papers' figures, each from runs of the real store in virtual time: ``fastps-lab repro figures``."""
