"""Learning with synthetic gradients: the thresholds of the claim, on the digits."""

from __future__ import annotations

import copy

import pytest
import torch

from fastps_lab.repro.claim import Setting
from fastps_lab.repro.claims.synthetic import judge, measure


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def without_labels(figures):
    for errors in figures["errors"].values():
        errors["cdni"] = errors["dni"]


def without_predictors(figures):
    for errors in figures["errors"].values():
        errors["dni"] = errors["frozen"]


def with_all_seeds_of_mnist_but_one_in_order(figures):
    figures["task"] = "mnist"
    for net in figures["errors"].values():
        net.update(backprop=[3.0, 3.0], cdni=[4.0, 4.0], dni=[5.0, 3.9], frozen=[20.0, 20.0])
    figures["late"] = {"10": [4.0, 4.0], "50": [4.0, 4.0]}


def with_lost_targets(figures):
    figures["late"]["10"] = figures["errors"]["4/2"]["frozen"]


def with_a_loss_that_grows(figures):
    figures["highest"] = 1.2


def after_longer_runs_that_gain_nothing(figures):
    figures["long"] = {"backprop": [1.0], "cdni": [1.6]}


@pytest.mark.timeout(300)
def test_synthetic_gradients_learn_and_labels_are_what_makes_them_usable():
    figures = measure(Setting(quick=True))
    assert judge(figures).holds, judge(figures).measured
    for switch_off in (
        without_labels,
        without_predictors,
        with_all_seeds_of_mnist_but_one_in_order,
        with_lost_targets,
        with_a_loss_that_grows,
        after_longer_runs_that_gain_nothing,
    ):
        changed = copy.deepcopy(figures)
        switch_off(changed)
        assert not judge(changed).holds, switch_off.__name__
