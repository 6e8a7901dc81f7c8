"""`fastps-lab repro`: the quick claims hold, results are written, and bad input is refused."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.data import cifar10
from fastps.data.images import MNIST_FILES
from fastps_lab.repro import convnet
from fastps_lab.repro.catalogue import CLAIMS, find
from fastps_lab.repro.claims import (
    processes,
)
from fastps_lab.repro.claims.codecs import decoded, decoded_by_columns, feedback_by_columns
from fastps_lab.repro.finished import Finished
from fastps_lab.repro.tasks import task

REPRO = [sys.executable, "-m", "fastps_lab", "repro"]


def repro(*arguments, cwd=None, code=0):
    """Standard output; checks the exit code."""
    done = subprocess.run([*REPRO, *arguments], cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def results(folder):
    """Results in the folder, by name."""
    return {run["name"]: run for run in Finished(folder / "results.jsonl").all}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [["nesterov", "staleness-limit"], pytest.param(["all"], marks=pytest.mark.nightly)],
    ids=["two", "all"],
)
def test_the_quick_claims_hold(tmp_path, names):
    """Except for those that are known not to reproduce, which may do either."""
    last = repro(*names, "--quick", "--json", cwd=tmp_path).splitlines()[-1]
    found = {result["name"]: result for result in json.loads(last)["results"]}
    out = tmp_path / "fastps-repro"
    assert list(found) == [claim.name for claim in find(names, quick=True)]
    table = (out / "results.md").read_text()
    for name, result in found.items():
        claim = CLAIMS[name]
        assert result["status"] in ("holds", "holds" if claim.reproduces else "not reproduced"), name
        assert results(out)[name]["measured"] == result["measured"]
        assert (out / f"{name}.png").exists() == (claim.draw is not None)
        assert result["measured"].replace("|", "/") in table


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


def test_claims_of_the_quick_form_repeat_and_only_those_of_reinforcement_learning_need_packages():
    for claim in find(["all"], quick=True):
        assert claim.repeats or claim.name in ("diloco", "fleet")  # of real processes
        assert not claim.packages or claim.name.startswith("rl-")


def test_a_terminal_shows_how_many_claims_are_finished_and_a_file_does_not(tmp_path):
    master, slave = pty.openpty()
    quick = [*REPRO, "nesterov", "--quick"]
    with subprocess.Popen(quick, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        ends = threading.Timer(120, process.kill)
        ends.start()
        shown = b""
        with contextlib.suppress(OSError):  # Linux: the other end is closed
            while read := os.read(master, 1 << 16):
                shown += read
        ends.cancel()
    os.close(master)
    assert process.returncode == 0, shown
    assert [text for text in (b"claims: 0/1, ", b"claims: 1/1, ") if text not in shown] == []
    assert b"claims" not in shown.rpartition(b"\x1b[K")[2]  # the line is removed
    assert "claims:" not in repro("nesterov", "--quick", cwd=tmp_path)


def test_the_list_names_every_claim():
    text = repro("list")
    assert all(name in text for name in CLAIMS)
    assert set(json.loads(repro("list", "--json"))["claims"]) == set(CLAIMS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such-claim"], "no claim 'no-such-claim'; fastps-lab repro list"),
        (["all"], "needs --dataset-dir DIR with mnist/ in it: train-images-idx3-ubyte.gz"),
        (["onebit", "--dataset-dir", "nowhere"], "lacks train-images-idx3-ubyte.gz, train-labels"),
        (["hogwild"], "w8a/ in it: w8a.gz (LIBSVM's data page, compressed with gzip); a9a/ in it: a9a.gz"),
        (["hogwild", "--dataset-dir", "nowhere"], "nowhere/movielens-latest-small lacks ratings.csv.gz"),
        (["cifar10"], "cifar10/ in it: cifar10-jpeg.tar.xz, train_labels_in_official_order.txt.gz"),
        (["cifar10", "--quick"], "cifar10 has no quick form"),
        (["int8", "--quick"], "int8 has no quick form"),
        (["nesterov", "--quick", "--out", "/proc/x"], "choose a folder that can be written"),
    ],
)
def test_bad_input_is_one_line(arguments, text, tmp_path, monkeypatch):
    monkeypatch.delenv("FASTPS_DATA_DIR", raising=False)
    said = repro(*arguments, cwd=tmp_path, code=1)
    assert text in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("option", ["--seed=-1", "--jobs=0"])
def test_wrong_usage(option):
    assert "is not a whole number" in repro("all", option, code=2)


def test_ctrl_c_leaves_finished_claims(tmp_path):
    names = ["nesterov", "implicit-momentum"]
    command = [*REPRO, *names, "--quick", "--jobs", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    late = time.monotonic() + 60
    while not (tmp_path / "results.jsonl").exists():
        assert time.monotonic() < late
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "fastps: stopped by Ctrl-C\n"
    assert process.returncode == 130
    assert {name: result["status"] for name, result in results(tmp_path).items()} == {"nesterov": "holds"}
    assert "| [nesterov](#nesterov) | holds |" in (tmp_path / "results.md").read_text()


# -- claims that cannot be measured --------------------------------------------------------------------------


def test_a_claim_that_cannot_be_measured_fails_and_the_others_finish(tmp_path):
    (tmp_path / "mnist").mkdir()
    for name in MNIST_FILES.values():
        (tmp_path / "mnist" / name).write_bytes(gzip.compress(b"no images"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "int8.png").write_text("of an earlier run")
    arguments = [
        "int8",
        "nesterov",
        "--dataset-dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--jobs",
        "1",
    ]
    done = subprocess.run([*REPRO, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 holds, 1 fails" in done.stdout
    failed, other = (results(tmp_path / "out")[name] for name in ("int8", "nesterov"))
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
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "1 holds, 1 fails" in text
    found = [results(tmp_path)[name] for name in names]
    assert [result["status"] for result in found] == ["fails", "holds"]
    assert found[0]["measured"] == "not measured: its process died, and once more when it ran again"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes that their parent is gone")
def test_no_process_measures_when_the_command_is_gone(tmp_path):
    names = ["nesterov", "implicit-momentum"]
    command = [*REPRO, *names, "--quick", "--jobs", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    measures, late = process_that_measures(process, []), time.monotonic() + 60
    while not (tmp_path / "results.jsonl").exists():
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


def test_the_help_says_which_data_a_claim_needs():
    text = repro("--help")
    assert "w8a/: w8a.gz\n    for hogwild, sandblaster, conjugate-gradients" in text
    assert "full form needs: cifar10/ in --dataset-dir, torch, pillow" in repro("list")


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
