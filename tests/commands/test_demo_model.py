"""The demo's model and data: its gradients against finite differences, the fixed split, the idx reader."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fastps._shared.process import CommandError
from fastps.commands.demo.config import TASKS
from fastps.commands.kit.datasets import CANVAS, load
from fastps.commands.kit.net import NAMES, evaluate, init_params, loss_and_grads, softmax
from fastps.data import images
from fastps.data.images import MNIST_FILES


@pytest.mark.parametrize("seed", range(5))
def test_gradients_agree_with_central_differences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = {k: v.astype(np.float64) for k, v in init_params(7, 5, 4, rng).items()}
    params["b1"] += rng.standard_normal(5) * 0.3
    params["b2"] += rng.standard_normal(4) * 0.3
    x, y = rng.standard_normal((11, 7)), rng.integers(0, 4, 11)
    _, grads = loss_and_grads(params, x, y)
    h = 1e-6
    for name in NAMES:
        assert grads[name].shape == params[name].shape
        numeric = np.zeros_like(params[name])
        for index in np.ndindex(params[name].shape):
            kept = params[name][index]
            params[name][index] = kept + h
            above, _ = loss_and_grads(params, x, y)
            params[name][index] = kept - h
            below, _ = loss_and_grads(params, x, y)
            params[name][index] = kept
            numeric[index] = (above - below) / (2 * h)
        np.testing.assert_allclose(grads[name], numeric, rtol=1e-6, atol=1e-8)


def test_gradients_are_float32_and_leave_the_batch_alone() -> None:
    rng = np.random.default_rng(0)
    params = init_params(64, 16, 10, rng)
    x, y = rng.standard_normal((8, 64), np.float32), rng.integers(0, 10, 8)
    before = x.copy()
    loss, grads = loss_and_grads(params, x, y)
    assert loss == pytest.approx(evaluate(params, x, y)[0])
    assert all(grad.dtype == np.float32 for grad in grads.values())
    np.testing.assert_array_equal(x, before)


def test_softmax_does_not_overflow() -> None:
    p = softmax(np.array([[1e4, 0.0, -1e4]], np.float32))
    np.testing.assert_allclose(p, [[1.0, 0.0, 0.0]])


def test_digits_are_complete_and_the_split_is_the_stated_one() -> None:
    digits = load("digits")
    assert digits.train_x.shape == (1442, 64)
    assert digits.test_x.shape == (355, 64)
    assert digits.train_x.dtype == np.float32
    with np.load(Path(images.__file__).parent / "files" / "digits.npz", allow_pickle=False) as npz:
        labels, test = npz["labels"], npz["test"]
        assert npz["images"].max() == 16
    rng = np.random.default_rng(1998)
    chosen = [
        rng.permutation(rows)[: len(rows) // 5] for rows in (np.flatnonzero(labels == c) for c in range(10))
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(chosen)), test)


def test_shifted_digits_are_the_digits_at_places_of_a_larger_canvas() -> None:
    small, shifted = load("digits"), load("shifted")
    assert shifted.train_x.shape == (8 * 1442, CANVAS * CANVAS)
    assert shifted.test_x.shape == (4 * 355, CANVAS * CANVAS)
    np.testing.assert_array_equal(shifted.train_x, load("shifted").train_x)
    np.testing.assert_array_equal(shifted.train_y[::8], small.train_y)
    canvas = shifted.test_x.reshape(-1, 4, CANVAS, CANVAS)
    for image, drawn in zip(small.test_x[:20].reshape(-1, 8, 8), canvas, strict=False):
        for picture in drawn:
            windows = np.lib.stride_tricks.sliding_window_view(picture, (8, 8)).reshape(-1, 8, 8)
            assert (windows == image).all((1, 2)).any()
            np.testing.assert_allclose(picture.sum(), image.sum(), rtol=1e-5)


def test_shares_are_disjoint_and_cover_the_training_data() -> None:
    digits = load("digits")
    shares = [digits.share(index, 4, seed=7)[0] for index in range(4)]
    assert sum(len(share) for share in shares) == len(digits.train_y)
    together = np.sort(np.concatenate(shares).view("V256").ravel())
    np.testing.assert_array_equal(
        together, np.sort(np.ascontiguousarray(digits.train_x).view("V256").ravel())
    )


def test_every_data_set_has_a_goal() -> None:
    assert TASKS["digits"].goal >= 0.96
    assert TASKS["mnist"].goal >= 0.975


def _idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.tobytes())


def test_idx_files_are_read_and_checked(tmp_path: Path) -> None:
    images = np.arange(2 * 28 * 28, dtype=np.uint64).astype(np.uint8).reshape(2, 28, 28)
    labels = np.array([3, 9], np.uint8)
    with pytest.raises(CommandError, match=r"original .gz files, got none of train-images"):
        load("mnist", str(tmp_path))
    for key, name in MNIST_FILES.items():
        (tmp_path / name).write_bytes(_idx(images if key.endswith("x") else labels))
    mnist = load("mnist", str(tmp_path))
    assert mnist.train_x.shape == (2, 784)
    np.testing.assert_array_equal(mnist.test_y, labels)

    path = tmp_path / MNIST_FILES["train_x"]
    path.write_bytes(b"not gzip")
    with pytest.raises(CommandError, match="expected a gzip file"):
        load("mnist", str(tmp_path))
    path.write_bytes(gzip.compress(gzip.decompress(_idx(images))[:-1]))
    with pytest.raises(CommandError, match="the bytes of shape"):
        load("mnist", str(tmp_path))
    with pytest.raises(CommandError, match="--dataset-dir"):
        load("mnist")
