"""Evaluates a model while others train it, keeps the best one, and says when to stop."""

from fastps.evaluation.evaluator import Evaluation, Evaluator, evaluator

__all__ = ["Evaluation", "Evaluator", "evaluator"]
