"""scikit-learn's tests of SGDClassifier and SGDRegressor, run with our classes (`make sklearn-tests`).

    python tests/long/sklearn_sgd.py            # options of pytest follow

They come with the installed scikit-learn. `DIFFERENT` lists the tests that fail, and why; the run fails if
another one fails, or if one of these passes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import sklearn
import sklearn.linear_model

from fastps.hogwild import HogwildClassifier, HogwildRegressor

FLOAT32 = "coefficients are float32, and 16 decimals or float64 are expected"
INTERNAL = "it looks at private attributes or functions of scikit-learn"
TIMING = "n_jobs threads train one problem together, so the result depends on timing (may pass)"
LOSSES = "losses that are not supported: modified_huber, perceptron, the epsilon-insensitive ones"

DIFFERENT = {
    "test_SGDClassifier_fit_for_all_backends": TIMING,
    "test_average_binary_computed_correctly": FLOAT32,
    "test_average_sparse": FLOAT32,
    "test_balanced_weight[SparseSGDClassifier]": FLOAT32 + ": one flower in 150 gets another class",
    "test_l1_ratio": FLOAT32 + ": penalties that differ by 1e-10 give the same within 1e-4",
    "test_late_onset_averaging_reached": FLOAT32,
    "test_plain_has_no_average_attr": INTERNAL,
    "test_regression_losses": LOSSES,
    "test_sgd_averaged_computed_correctly": FLOAT32,
    "test_sgd_averaged_partial_fit": FLOAT32,
    "test_sgd_clf": LOSSES,
    "test_sgd_dtype_match[float64-": FLOAT32,
    "test_sgd_epsilon_insensitive": LOSSES,
    "test_sgd_error_on_zero_validation_weight": "weights that are all zero are refused before they are split",
    "test_sgd_multiclass_average": FLOAT32,
    "test_sgd_predict_proba_method_access": LOSSES,
    "test_sgd_proba": LOSSES,
    "test_tol_parameter": "examples are shuffled in another order: with this seed, and with others in "
    "scikit-learn, both tolerances end at the same epoch",
    "test_underflow_or_overflow": "numbers of 1e300 do not fit into float32: NumPy's error, instead of ours, "
    "says so where np.errstate(all='raise') asks for one",
    "test_validation_mask_correctly_subsets": INTERNAL,
}
"""Names, or their beginnings, of tests that fail with our classes, and why."""

ELSEWHERE = ("oneclass", "one_class", "ocsvm", "test_loss_", "test_gradient_")
"""Parts of the names of tests of other classes, and of scikit-learn's own compiled losses."""


class Verdicts:
    """A plugin of pytest: leaves out tests of other classes, and compares failures with the table."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keeps the tests of the classes that we replace."""
        items[:] = [item for item in items if not any(part in item.name.lower() for part in ELSEWHERE)]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes a failure of any phase."""
        name = report.nodeid.split("::")[-1]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)

    def tell(self) -> bool:
        """Prints what differs and why, and returns whether the table says just that."""
        reasons = {name: self._reason(name) for name in sorted(self.failed)}
        unlisted = [name for name, reason in reasons.items() if reason is None]
        stale = [name for name in sorted(self.passed) if self._reason(name) not in (None, TIMING)]
        print(f"\nscikit-learn {sklearn.__version__}: {len(self.passed)} pass, {len(self.failed)} differ")
        for name, reason in reasons.items():
            print(f"  {name}: {reason or 'NOT LISTED'}")
        for name in stale:
            print(f"  {name}: passes, but is listed")
        return bool(self.passed) and not unlisted and not stale

    @staticmethod
    def _reason(name: str) -> str | None:
        listed = [
            reason
            for test, reason in DIFFERENT.items()
            if name == test or name.startswith(test if "[" in test else f"{test}[")
        ]
        return listed[0] if listed else None


def main() -> int:
    """The exit status: 0 if exactly the listed tests fail."""
    sklearn.linear_model.SGDClassifier = HogwildClassifier
    sklearn.linear_model.SGDRegressor = HogwildRegressor
    verdicts = Verdicts()
    options = [
        "-q",
        "-n0",
        "-c",
        os.devnull,  # the project's settings refuse scikit-learn's marks
        "--tb=no",
        "--no-summary",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        *sys.argv[1:],
    ]
    pytest.main([*options, "--pyargs", "sklearn.linear_model.tests.test_sgd"], plugins=[verdicts])
    return 0 if verdicts.tell() else 1


if __name__ == "__main__":
    sys.exit(main())
