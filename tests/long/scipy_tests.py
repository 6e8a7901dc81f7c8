"""Runs scipy's own tests of `scipy.optimize` with the optimizers of `fastps.optimize`.

    python tests/long/scipy_tests.py [-k EXPRESSION]

scipy's wheels have the tests. Its functions for CG and L-BFGS-B are replaced by a shim of `minimize` on a
`fastps.Store`, below scipy's own handling of arguments, derivatives and callbacks; problems with bounds stay
with scipy. Tests that reach the shim count. `make scipy-tests` fails if another one fails than those in
`REASONS`, or if one of these passes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize._lbfgsb_py
import scipy.optimize._minimize
import scipy.optimize._optimize as scipy_optimize
from scipy.optimize import OptimizeResult

import fastps
from fastps.optimize import CG, LBFGS, StrongWolfe, minimize
from fastps.optimize.method import Method

#: Tests that fail, by their names without class and parameters.
REASONS = {
    "test_cg": "expects the evaluations and points of scipy 0.7",
    "test_l_bfgs_b": "expects the evaluations and points of scipy 0.7",
    "test_minimize_l_bfgs_b": "counts evaluations per thread; those of minimize run on a thread of their own",
    "test_l_bfgs_b_maxiter": "expects the text of scipy's message",
    "test_invalid_c1_c2": "expects the text of scipy's error; ConfigError names c1 or c2, too",
    "test_minimize_l_bfgs_b_ftol": "minimize has no ftol: it goes on until the gradient is within tol",
    "test_minimize_l_bfgs_maxls": "expects a failure with one trial a search; the shim passes no maxls",
    "test_initial_step_scaling": "expects 3 iterations with a gradient of half the right length",
    "test_nan_values": "expects a result; a function that is NaN at the first point raises NonFiniteError",
    "test_minimize_warnings_gh1953": "expects a warning about disp; minimize has no disp",
    "test_minimize_maxiter_noninteger": "expects that 100.1 iterations are possible; ConfigError says no",
}


class Shim:
    """Stands for one of scipy's functions, whose fifth argument has this name; counts its calls."""

    def __init__(self, plain: Callable[..., Any], method: Method, fifth: str) -> None:
        self.plain, self.method, self.fifth, self.calls = plain, method, fifth, 0

    def __call__(
        self, fun: Any, x0: Any, args: Any = (), jac: Any = None, *more: Any, **options: Any
    ) -> OptimizeResult:
        options |= dict(zip([self.fifth], more, strict=False))
        if options.get("bounds") is not None:
            return self.plain(fun, x0, args, jac, **options)
        self.calls += 1
        start = np.asarray(x0, dtype=np.float64).flatten()
        given = {
            "finite_diff_rel_step": options.get("finite_diff_rel_step"),
            "workers": options.get("workers"),
        }
        eps = options.get("eps", 1.4901161193847656e-08)
        function = scipy_optimize._prepare_scalar_function(fun, start, jac, args=args, epsilon=eps, **given)
        callback = options.get("callback")

        def objective(params: Any, _: Any) -> Any:
            x = params["x"].copy()
            return float(function.fun(x)), {"x": np.array(function.grad(x), dtype=np.float64)}

        with fastps.Store() as store:
            store.register("x", start, optimizer=fastps.SGD(lr=1.0))

            def forward(so_far: Any) -> bool:
                if callback is None or so_far.nit == 0:
                    return False
                at = OptimizeResult(x=store.pull("x"), fun=so_far.fun)
                return bool(scipy_optimize._call_callback_maybe_halt(callback, at))

            limit = options.get("maxiter")
            found = minimize(
                store,
                ["x"],
                objective,
                samples=1,
                method=self.method,
                line_search=StrongWolfe(c1=options.get("c1", 1e-4), c2=options.get("c2")),
                tol=float(options.get("gtol", 1e-5)),
                max_iterations=200 * len(start) if limit is None else limit,
                max_evaluations=max(1, options.get("maxfun", 15_000)),
                callback=forward,
            )
            x = store.pull("x")
        return OptimizeResult(
            x=x,
            fun=found.fun,
            jac=np.array(function.grad(x)),
            nit=found.nit,
            nfev=function.nfev,
            njev=function.ngev,
            status=found.status,
            success=found.success,
            message=found.message,
        )


class Counted:
    """A plugin of pytest that notes which tests reach the shims, and how these end."""

    def __init__(self, shims: list[Shim]) -> None:
        self.shims = shims
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        before = sum(shim.calls for shim in self.shims)
        try:
            result = yield
        except (Exception, pytest.fail.Exception) as error:
            if sum(shim.calls for shim in self.shims) > before:
                self.failed[item.nodeid.split("::", 1)[1]] = (
                    str(error).strip().splitlines()[0] if str(error) else ""
                )
            raise
        if sum(shim.calls for shim in self.shims) > before:
            self.passed.append(item.nodeid)
        return result


def main() -> int:
    plain = scipy_optimize._minimize_cg, scipy.optimize._lbfgsb_py._minimize_lbfgsb
    cg, lbfgs = Shim(plain[0], CG(), "callback"), Shim(plain[1], LBFGS(), "bounds")
    for module in (scipy_optimize, scipy.optimize._minimize):
        module._minimize_cg = cg
    for module in (scipy.optimize._lbfgsb_py, scipy.optimize._minimize):
        module._minimize_lbfgsb = lbfgs
    counted = Counted([cg, lbfgs])
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"  # not those of this project
        settings.write_text("[pytest]\n")
        tests = Path(scipy.optimize.__file__).parent / "tests" / "test_optimize.py"
        options = ["-c", str(settings), "-q", "-p", "no:cacheprovider", "--tb=no", "-p", "no:randomly"]
        pytest.main([str(tests), *options, *sys.argv[1:]], plugins=[counted])
    names = {name: name.split("[")[0].split("::")[-1] for name in counted.failed}
    unknown = {name: text for name, text in counted.failed.items() if names[name] not in REASONS}
    print(f"{len(counted.passed)} tests that reach fastps pass, {len(counted.failed)} fail:")
    for name, text in counted.failed.items():
        print(f"  {name}: {REASONS.get(names[name], 'NOT LISTED: ' + text)}")
    gone = set(REASONS) - set(names.values()) if not sys.argv[1:] else set()
    for name in gone:
        print(f"  {name} passes: remove it from the list")
    return int(bool(unknown or gone or not counted.passed))


if __name__ == "__main__":
    os.environ["SCIPY_ARRAY_API"] = "0"
    sys.exit(main())
