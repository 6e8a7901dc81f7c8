"""Scikit-learn estimators trained by threads that share their coefficients without any lock.

`HogwildClassifier` and `HogwildRegressor` take the arguments of scikit-learn's `SGDClassifier` and
`SGDRegressor`; `HogwildMatrixFactorization` learns ratings. They need scikit-learn:
`pip install scikit-learn`. The method is Hogwild's (Niu et al. 2011).

>>> from fastps.hogwild import HogwildClassifier
>>> X, y = np.array([[-2.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [2.0, 1.0]]), np.array([1, 1, 2, 2])
>>> HogwildClassifier(loss="log_loss", random_state=0).fit(X, y).predict([[-0.8, -1.0]])
array([1])
"""

from fastps._shared.idioms.missing import missing as _missing

try:
    import sklearn as _sklearn
except ImportError as _error:
    raise _missing("fastps.hogwild", _error, "sklearn", "scikit-learn") from _error

from fastps.hogwild._classifier import HogwildClassifier
from fastps.hogwild._factorization import HogwildMatrixFactorization
from fastps.hogwild._regressor import HogwildRegressor
from fastps.hogwild._training import Epoch

__all__ = ["Epoch", "HogwildClassifier", "HogwildMatrixFactorization", "HogwildRegressor"]

del _sklearn
