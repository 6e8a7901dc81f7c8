"""`fastps repro`: the quick claims hold, each fails without its effect, and bad input is refused."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.repro import convnet
from fastps.commands.repro.catalogue import CLAIMS, find
from fastps.commands.repro.claim import Setting
from fastps.commands.repro.claims import (
    hogwild,
    momentum,
    optimizers,
    processes,
    reinforcement,
    sandblaster,
    toys,
    training,
)
from fastps.commands.repro.claims.codecs import decoded, decoded_by_columns, feedback_by_columns
from fastps.commands.repro.tasks import task
from fastps.data import cifar10
from fastps.data.images import MNIST_FILES
from fastps.optimize import CG, LBFGS

REPRO = [sys.executable, "-m", "fastps", "repro"]


def repro(*arguments, cwd=None, code=0):
    """Standard output; checks the exit code."""
    done = subprocess.run([*REPRO, *arguments], cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


# -- what the figures are when the effect is switched off ----------------------------------------------------


def one_worker(figures):
    fitted = momentum.fit(np.array(momentum.path(1, 16, 0)))
    for fit in figures["fits"].values():
        fit["momentum"], fit["rate"] = fitted


def same_workers(figures):
    figures["losses"] = dict.fromkeys(figures["losses"], figures["losses"]["1"])


def no_matching(figures):
    for arms in figures["losses"].values():
        arms["matched"] = arms["fixed"]


def no_other_replicas(figures):
    errors = figures["errors"]["sgd"]
    errors["32"] = errors["1"]


def push_every_step(figures):
    figures["bytes"] = figures["bytes"][:1] * len(figures["bytes"])


def feedback_in_every_arm(figures):
    figures["losses"]["none"] = figures["losses"]["feedback"]


def no_codec(figures):
    figures["bytes"] = dict.fromkeys(figures["bytes"], figures["bytes"]["float32"])


def no_backup(figures):
    figures["times"]["1"] = figures["times"]["0"]


def same_bound(figures):
    figures["bounds"] = dict.fromkeys(figures["bounds"], figures["bounds"]["0"])


def no_limit(figures):
    figures["losses"]["limit"] = figures["losses"]["none"]


def another_rule(figures):
    rules = {**optimizers.RULES, "momentum": (fastps.SGD(lr=0.05, momentum=0.9), optimizers.nesterov)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "RULES", rules)
        figures.update(optimizers.measure_float64(Setting(quick=True)))


def as_printed(figures):
    figures["identity"] = abs(figures["norm"] - figures["literal"])


def by_epoch(figures):
    figures["moved"] *= figures["by epoch"]


def a_wrong_slope(figures):
    wrong = dataclasses.replace(toys.PROBLEMS["Beale"], slope=toys.himmelblau_slope)
    figures["errors"]["Beale"] = toys.slope_error(wrong, np.random.default_rng(0))


def a_rate_that_is_too_high(figures):
    run = task("digits").train(fastps.SGD(lr=4.0), updates=300, seed=1, workers=32)
    figures["runs"]["Sync"]["errors"] = [run.error]


def another_history(figures):
    problem = sandblaster.load("digits", None)
    figures.update(sandblaster.compare(problem, LBFGS(history=5), others=1))


def a_rough_search(figures):
    figures["steps"]["CG, FR"] = sandblaster.steps_on_a_quadratic(CG("FR"), c2=0.9)


def no_copies(figures):
    figures["arms"]["equal shares, copies"] = figures["arms"]["equal shares"]


OFF = {
    "sandblaster": another_history,
    "conjugate-gradients": a_rough_search,
    "backup-tasks": no_copies,
    "optimizers-float64": another_rule,
    "nesterov": as_printed,
    "adam-counts-steps": by_epoch,
    "toy-problems": a_wrong_slope,
    "every-way": a_rate_that_is_too_high,
    "implicit-momentum": one_worker,
    "best-momentum": same_workers,
    "momentum-matching": no_matching,
    "downpour-adagrad": no_other_replicas,
    "n-push": push_every_step,
    "onebit": feedback_in_every_arm,
    "wire-bytes": no_codec,
    "backup-workers": no_backup,
    "bounded-waiting": same_bound,
    "staleness-limit": no_limit,
}


@pytest.mark.timeout(600)
def test_the_quick_claims_hold_and_fail_without_their_effect(tmp_path):
    last = repro("all", "--quick", "--json", cwd=tmp_path).splitlines()[-1]
    results = {result["name"]: result for result in json.loads(last)["results"]}
    out = tmp_path / "fastps-repro"
    assert list(results) == [claim.name for claim in find(["all"], quick=True)]
    assert {name for name, result in results.items() if result["status"] == "holds"} == set(OFF)
    table = (out / "results.md").read_text()
    for name, result in results.items():
        claim = CLAIMS[name]
        assert json.loads((out / f"{name}.json").read_text())["measured"] == result["measured"]
        assert (out / f"{name}.png").exists() == (claim.draw is not None)
        assert result["measured"].replace("|", "/") in table
        assert (result["status"] == "reported") == (claim.threshold == "reported")
    for name, switch_off in OFF.items():
        figures = results[name]["figures"]
        assert CLAIMS[name].judge(figures).holds
        switch_off(figures)
        assert CLAIMS[name].judge(figures).holds is False, name


def test_claims_are_repeated_with_the_same_digits_without_data(tmp_path, monkeypatch):
    """Also from an empty folder, and whatever the environment names as the folder of data sets."""
    monkeypatch.setenv("FASTPS_DATA_DIR", "/nowhere")
    names = ["staleness-limit", "conjugate-gradients"]
    found = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        said = repro(*names, "--quick", "--json", cwd=tmp_path / folder)
        found.append(json.loads(said.splitlines()[-1]))
    assert found[0] == found[1]
    other = repro(names[0], "--quick", "--json", "--seed", "5", "--out", str(tmp_path / "c"))
    assert json.loads(other.splitlines()[-1])["results"][0]["measured"] != found[0]["results"][0]["measured"]


def test_claims_of_the_quick_form_need_no_packages_and_repeat():
    for claim in find(["all"], quick=True):
        assert claim.repeats
        assert not claim.packages


def test_the_list_names_every_claim():
    told = repro("list")
    assert all(name in told for name in CLAIMS)
    assert set(json.loads(repro("list", "--json"))["claims"]) == set(CLAIMS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such-claim"], "no claim 'no-such-claim'; fastps repro list"),
        (["all"], "needs --data-dir DIR with mnist/ in it: train-images-idx3-ubyte.gz"),
        (["onebit", "--data-dir", "nowhere"], "lacks train-images-idx3-ubyte.gz, train-labels"),
        (["hogwild"], "w8a/ in it: w8a.gz (LIBSVM's data page, compressed with gzip); a9a/ in it: a9a.gz"),
        (["hogwild", "--data-dir", "nowhere"], "nowhere/movielens-latest-small lacks ratings.csv.gz"),
        (["cifar10"], "cifar10/ in it: cifar10-jpeg.tar.xz, train_labels_in_official_order.txt.gz"),
        (["cifar10", "--quick"], "cifar10 has no quick form"),
        (["int8", "--quick"], "int8 has no quick form"),
        (["wire-bytes", "--quick", "--out", "/proc/x"], "choose a folder that can be written"),
    ],
)
def test_bad_input_is_one_line(arguments, text, tmp_path):
    said = repro(*arguments, cwd=tmp_path, code=1)
    assert text in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("option", ["--seed=-1", "--jobs=0"])
def test_wrong_usage(option):
    assert "is not a whole number" in repro("all", option, code=2)


def test_ctrl_c_leaves_finished_claims(tmp_path):
    names = ["wire-bytes", "implicit-momentum"]
    command = [*REPRO, *names, "--quick", "--jobs", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    late = time.monotonic() + 60
    while not (tmp_path / "wire-bytes.json").exists():
        assert time.monotonic() < late
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "fastps: stopped by Ctrl-C\n"
    assert process.returncode == 130
    assert json.loads((tmp_path / "wire-bytes.json").read_text())["status"] == "holds"
    assert not (tmp_path / "implicit-momentum.json").exists()
    assert "| [wire-bytes](#wire-bytes) | holds |" in (tmp_path / "results.md").read_text()


# -- claims that cannot be measured --------------------------------------------------------------------------


def test_a_claim_that_cannot_be_measured_fails_and_the_others_finish(tmp_path):
    (tmp_path / "mnist").mkdir()
    for name in MNIST_FILES.values():
        (tmp_path / "mnist" / name).write_bytes(gzip.compress(b"no images"))
    (tmp_path / "out").mkdir()
    for kind in ("json", "png"):
        (tmp_path / "out" / f"int8.{kind}").write_text("of an earlier run")
    arguments = [
        "int8",
        "nesterov",
        "--data-dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--jobs",
        "1",
    ]
    done = subprocess.run([*REPRO, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 holds, 1 fails" in done.stdout
    failed, other = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("int8", "nesterov")
    )
    assert (failed["status"], other["status"]) == ("fails", "holds")
    assert failed["measured"].startswith("not measured: ")
    assert not (tmp_path / "out" / "int8.png").exists()
    assert failed["measured"].replace("|", "/") in (tmp_path / "out" / "results.md").read_text()


def process_that_measures(command, but):
    """The process id of one of the pool, other than these."""
    late = time.monotonic() + 60
    while time.monotonic() < late:
        for child in Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split():
            if int(child) not in but and b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.01)
    raise AssertionError("no process measures")


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_claim_whose_process_dies_runs_again_and_fails_if_that_dies(tmp_path):
    names = ["adam-counts-steps", "nesterov"]
    command = [*REPRO, *names, "--quick", "--jobs", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    killed = []
    for _ in range(2):
        killed.append(process_that_measures(process, killed))
        os.kill(killed[-1], signal.SIGKILL)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "1 holds, 1 fails" in told
    found = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    assert [result["status"] for result in found] == ["fails", "holds"]
    assert found[0]["measured"] == "not measured: its process died, and once more when it ran again"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes that their parent is gone")
def test_no_process_measures_when_the_command_is_gone(tmp_path):
    names = ["nesterov", "implicit-momentum"]
    command = [*REPRO, *names, "--quick", "--jobs", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    measures, late = process_that_measures(process, []), time.monotonic() + 60
    while not (tmp_path / "nesterov.json").exists():
        assert time.monotonic() < late
        time.sleep(0.02)
    process.kill()
    process.wait()
    while is_running(measures):
        assert time.monotonic() < late
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_figure_that_is_not_a_number_fails():
    nan = float("nan")
    for name, figures in (
        ("optimizers-float64", {"off": {"SGD": 1e-7, "Adam": nan}}),
        ("toy-problems", {"errors": {"Beale": 1e-9, "saddle": nan}, "table": {}}),
        (
            "wire-bytes",
            {"bytes": {"float32": [4.0], "bfloat16": [2.0], "int8": [1 + 1 / 64], "onebit": [nan]}},
        ),
        ("sandblaster", {"shards": [1e-14, nan], "itself": [1e-14, 1e-14], "same bits": True}),
    ):
        assert CLAIMS[name].judge(figures).holds is False, name


def test_toy_problems_name_the_rate_that_the_optimizer_has(monkeypatch):
    monkeypatch.setattr(toys, "PROBLEMS", {"quadratic": toys.PROBLEMS["quadratic"]})
    monkeypatch.setattr(toys, "RATES", (0.25,))
    [table] = toys.measure(Setting(quick=True))["table"].values()
    assert {name: run["rate"] for name, run in table.items()} == {
        name: of(0.25).lr for name, of in toys.OPTIMIZERS.items()
    }
    assert table["Adadelta"]["rate"] == 2.5


def test_the_help_says_which_data_a_claim_needs():
    told = repro("--help")
    assert "w8a/: w8a.gz\n    for sandblaster, conjugate-gradients, hogwild" in told
    assert "full form needs: cifar10/ in --data-dir, torch, pillow" in repro("list")


# -- error feedback ------------------------------------------------------------------------------------------


def test_the_arm_without_feedback_decodes_as_the_codec_does(rng):
    """A first push has no residual, so it is what the codec leaves."""
    for size in (1, 7, 1024, 1025, 5000):
        gradient = rng.standard_normal(size).astype(np.float32)
        with fastps.Store() as store:
            store.register("w", np.zeros(size, np.float32), fastps.SGD(lr=1.0))
            with fastps.Worker(store, {"w": gradient}, fastps.Async(), fastps.OneBit()) as worker:
                worker.step({"w": gradient})
                np.testing.assert_allclose(-worker.params["w"], decoded(gradient), rtol=1e-5)


def test_the_arm_with_scales_per_column_keeps_their_means_and_its_residual(rng):
    gradient = rng.standard_normal((50, 3)).astype(np.float32)
    for k, column in enumerate(decoded_by_columns(gradient).T):
        np.testing.assert_allclose(column, decoded(gradient[:, k]), rtol=1e-6)
    np.testing.assert_allclose(decoded_by_columns(gradient[:, 0]), decoded(gradient[:, 0]), rtol=1e-6)

    digits, total, sent, without = task("digits"), 0, 0, 0
    of, params = feedback_by_columns(digits), digits.start(1)
    for step in range(1, 201):
        gradient = digits.gradient(params, 0, step, np.random.default_rng(step))[0]["w1"]
        total, without = total + gradient, without + decoded_by_columns(gradient)
        sent += of(params, 0, step, np.random.default_rng(step))[0]["w1"]
    assert 0 < np.abs(total - sent).mean() < 0.2 * np.abs(total - without).mean()


def test_error_feedback_telescopes(rng):
    """The sum of the decoded pushes and the residual are the sum of the gradients."""
    total = np.zeros(3000)
    with fastps.Store() as store:
        store.register("w", np.zeros(3000, np.float32), fastps.SGD(lr=1.0))
        with fastps.Worker(store, {"w": total}, fastps.Async(), fastps.OneBit()) as worker:
            for _ in range(50):
                gradient = rng.standard_normal(3000).astype(np.float32)
                total += gradient
                worker.step({"w": gradient})
            residual = worker.state_dict()["residuals"]["w"]
            decoded_sum = -store.pull("w").astype(np.float64)
    np.testing.assert_allclose(decoded_sum + residual, total, atol=1e-4)
    assert np.abs(residual).max() > 1


def test_every_claim_says_what_it_is():
    for name, claim in CLAIMS.items():
        assert name == claim.name
        assert Path(name).name == name
        assert claim.says.endswith(".")
        assert claim.source
        assert claim.threshold


def test_the_claim_about_reinforcement_learning_fails_if_frames_grow_or_runs_stay_unsolved():
    few = [70_000, 80_000, 90_000, 100_000, None]
    figures = {"frames": {workers: list(few) for workers in ("1", "2", "4", "8")}}
    assert not reinforcement.judge(figures).holds  # four runs are unsolved
    figures["frames"]["1"] = figures["frames"]["2"] = few[:4]
    assert reinforcement.judge(figures).holds
    figures["frames"]["8"] = [2 * (frames or 90_000) for frames in few]
    assert not reinforcement.judge(figures).holds


def test_the_claim_about_8_bits_fails_if_they_lose_accuracy():
    float32 = [4.1, 4.3, 4.2, 4.0, 4.4]
    figures = {"errors": {"float32": float32, "int8": [4.3, 4.1, 4.3, 4.1, 4.3]}}
    assert CLAIMS["int8"].judge(figures).holds
    figures["errors"]["int8"] = [error + 0.25 for error in float32]
    assert CLAIMS["int8"].judge(figures).holds is False


def test_the_claim_about_faults_fails_if_accuracy_or_the_ledger_is_off():
    figures = {
        "accuracy": {"without": [97.0, 97.2, 97.1], "with": [96.9, 97.3, 97.0]},
        "balances": [[8000, {"w1": 8000, "b1": 8001}, 1]] * 6,
        "pauses": [{"before": 120, "meanwhile": 0, "others": 900}] * 3,
    }
    assert processes.judge(figures).holds
    for wrong in ({"w1": 8000, "b1": 7999}, {"w1": 8002, "b1": 8000}):
        assert not processes.judge({**figures, "balances": [[8000, wrong, 1]]}).holds
    for wrong in (
        None,
        {"before": 120, "meanwhile": 5, "others": 900},
        {**figures["pauses"][0], "others": 0},
    ):
        told = processes.judge({**figures, "pauses": [*figures["pauses"][1:], wrong]})
        assert not told.holds
        assert told.measured.endswith("paused while others pushed in 2 of 3")
    figures["accuracy"]["with"] = [96.4, 96.5, 96.6]
    assert not processes.judge(figures).holds


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_pause_is_seen_in_the_ledgers(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PAUSE", 0.5)
    command = [sys.executable, "-m", "fastps", "demo", "--no-kill", "--shards", "1", "--workers", "2"]
    command += ["--updates", "1000000", "--seconds", "60", "--out", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    try:
        found = processes.pause_a_worker(demo, tmp_path)
    finally:
        demo.terminate()
        demo.wait()
    assert found is not None
    assert found["before"] >= processes.FIRST
    assert found["meanwhile"] == 0
    assert found["others"] > 0
    assert processes.pause_a_worker(demo, tmp_path) is None  # it has ended


def test_threads_without_locks_train_the_net_of_every_way():
    figures = training.measure_threads(Setting(quick=True))
    serial = figures["errors"]["serial"]
    assert max(figures["errors"]["Hogwild"]) < max(serial) + 3  # untrained: 90 %
    for points, holds in ((0.4, True), (0.6, False)):
        figures["errors"]["Hogwild"] = [error + points for error in serial]
        assert training.judge_threads(figures).holds is holds


def test_the_claim_about_hogwild_fails_if_threads_lose_accuracy_on_sparse_data():
    def arms(*errors):
        counts = zip(hogwild.THREADS, errors, strict=True)
        return {str(count): {"errors": [error] * 3, "seconds": [1.0] * 3} for count, error in counts}

    sets = {
        "MovieLens": arms(0.85, 0.851, 0.852),
        "w8a": arms(0.06, 0.0605, 0.06),
        "a9a": arms(0.3, 0.4, 0.4),
    }
    assert hogwild.judge({"sets": sets}).holds  # a9a is dense
    assert not hogwild.judge({"sets": {**sets, "w8a": arms(0.06, 0.06, 0.061)}}).holds


def test_the_claim_about_cifar10_is_only_run_by_name():
    assert "cifar10" not in [
        claim.name for claim in (*find(["all"], quick=False), *find(["all"], quick=True))
    ]
    assert find(["cifar10"], quick=False) == [CLAIMS["cifar10"]]


def test_images_of_cifar10_come_out_in_their_order(tmp_path):
    """Training images have the classes of the list, test images those of their folders."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    classes = ["automobile", "airplane", "automobile"]
    files = [f"{kind}/{name}/{k:04}.jpg" for kind in ("train", "test") for k, name in enumerate(classes)]
    with tarfile.open(tmp_path / "cifar10-jpeg.tar.xz", "w:xz") as archive:
        for k, name in enumerate(files):
            pixels = io.BytesIO()
            image.new("RGB", (32, 32), (40 * k, 0, 255)).save(pixels, "jpeg")
            member = tarfile.TarInfo(name)
            member.size = len(pixels.getvalue())
            archive.addfile(member, io.BytesIO(pixels.getvalue()))
    with gzip.open(tmp_path / "train_labels_in_official_order.txt.gz", "wt") as stream:
        stream.write("\n".join(classes))
    with pytest.raises(fastps.ConfigError, match=r"no cifar10-jpeg\.tar\.xz"):
        cifar10(tmp_path / "nowhere")
    data = cifar10(tmp_path)
    images, labels = data.test_x, data.test_y
    assert (images.shape, labels.tolist()) == ((3, 3, 32, 32), [1, 0, 1])
    assert np.abs(images[:, 0, 5, 5].astype(int) - [120, 160, 200]).max() <= 3
    assert data.train_y.tolist() == [1, 0, 1]
    assert data.inputs == 3 * 32 * 32


def test_a_worker_trains_the_convolutional_net_on_a_server(tmp_path, rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for kind, count in (("train", 200), ("test", 1000)):
        np.save(tmp_path / f"{kind}_x.npy", rng.integers(0, 256, (count, 3, 32, 32), np.uint8))
        np.save(tmp_path / f"{kind}_y.npy", rng.integers(0, 10, count))
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    try:
        with fastps.serve() as server:
            address, out = server.address_list, tmp_path / "seen.npz"
            convnet.train(convnet.Config(address, str(tmp_path), str(out), "serial", 0, 6, 3, seed=1))
            last = convnet.final_values(address)
        with np.load(out) as kept:
            assert kept["updates"].tolist() == [2, 4, 6]
            assert np.array_equal(kept["values"][-1], last)
            assert not np.array_equal(kept["values"][0], last)
        assert 50 < convnet.test_error(last, tmp_path) < 100  # labels are random
    finally:
        torch.set_num_threads(threads)
        torch.random.set_rng_state(state)
