"""Pictures of claims and figures: titles, labels of axes, goals, colours, and rates that do not arrive."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastps.commands.kit import CommandError
from fastps_lab.repro.catalogue import CLAIMS, FIGURES
from fastps_lab.repro.claim import Setting
from fastps_lab.repro.costs.costs import read_costs
from fastps_lab.repro.figures import asynchrony, hogwild, parts, toys
from fastps_lab.repro.figures.training import methods
from fastps_lab.repro.runner import draw_again, draw_on


def picture(name, numbers):
    """A drawn claim or figure."""
    drawn = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(drawn)
    draw_on((CLAIMS | FIGURES)[name], numbers, drawn)
    drawn.canvas.draw()
    return drawn


def labels(axis):
    """The labels that an axis shows."""
    low, high = sorted(axis.get_view_interval())
    return [tick.label1.get_text() for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def legend(drawn):
    """Texts and colours of all legends, without those that a title says."""
    found = [*drawn.legends, *(axes.get_legend() for axes in drawn.axes if axes.get_legend() is not None)]
    return {
        text.get_text(): handle.get_color() if hasattr(handle, "get_color") else None
        for one in found
        for text, handle in zip(one.get_texts(), one.legend_handles, strict=True)
    }


def accuracy_numbers(net):
    errors = (90.0, 62.0, 38.0)
    arms = [
        {"method": method, "workers": workers, "rate": 0.1, "grid": {"0.1": 5.0}}
        | {"curves": [[(k, 10.0**k, error) for k, error in enumerate(errors)]] * 2}
        for method, workers in (
            (methods.ONE, 1),
            ("Downpour, Adagrad", 4),
            ("Downpour, Adagrad, warm start", 4),
            ("Downpour, fixed rate", 4),
        )
    ]
    return {"settings": "", "seeds": [1, 2], "net": net, "workers": [4], "goal": 45.0, "arms": arms}


def test_an_axis_of_errors_says_60_and_40_and_the_legend_has_the_goal():
    drawn = picture("figures/accuracy-cifar10", accuracy_numbers("cifar10"))
    assert labels(drawn.axes[0].yaxis) == ["40", "50", "60"]
    assert labels(drawn.axes[0].xaxis) == ["10", "20", "40", "60", "100"]
    shown = legend(drawn)
    assert "goal: 45 %" in shown
    assert len(set(shown.values())) == len(shown)


def test_a_title_has_the_claim_and_the_data_set():
    for net, name in (("cifar10", "CIFAR-10"), ("mnist", "MNIST"), ("digits", "digits")):
        title = picture("figures/accuracy-mnist", accuracy_numbers(net)).get_suptitle()
        *says, about = title.splitlines()
        assert " ".join(says) == FIGURES["figures/accuracy-mnist"].says
        assert about == f"figures/accuracy-mnist, {name}, virtual time"


def test_powers_of_ten_stay_where_an_axis_has_many():
    for low, high in ((1e-9, 1.0), (0.5, 2000.0)):
        drawn = Figure()
        FigureCanvasAgg(drawn)
        claim = dataclasses.replace(
            CLAIMS["nesterov"],
            draw=lambda figures, figure, ends=(low, high): figure.subplots().semilogy([0, 1], ends),
        )
        draw_on(claim, {}, drawn)
        drawn.canvas.draw()
        powers = [text for text in labels(drawn.axes[0].yaxis) if "10^" in text]
        assert bool(powers) == (low == 1e-9), labels(drawn.axes[0].yaxis)
    assert labels(drawn.axes[0].yaxis) == ["1", "10", "100", "1,000"]


def test_what_a_legend_distinguishes_has_colours_of_its_own():
    """Also of one machine's links, and of pushes with locks."""
    numbers = parts.measure(Setting(quick=True, costs=read_costs()))
    shown = legend(picture("figures/parts", numbers))
    assert len({shown[link] for link in parts.LINKS}) == len(parts.LINKS)

    speeds = {kind: {how: {"1": 1.0, "2": 1.5, "4": 1.2} for how in hogwild.LOCKS} for kind in hogwild.COLORS}
    numbers = {
        "data": "MovieLens and a9a",
        "speeds": speeds,
        "lost": speeds,
        "free": speeds["sparse"]["exact"],
    }
    drawn = picture("figures/hogwild", {**numbers, "overlap": {"sparse": 0.1, "dense": 0.5}})
    assert drawn.get_suptitle().endswith("figures/hogwild, MovieLens and a9a")
    shown = {label: color for label, color in legend(drawn).items() if "predicted" not in label}
    assert len(set(shown.values())) == len(shown) == 5


def test_where_no_rate_arrives_none_is_called_the_best(monkeypatch):
    found = {"rate": 0.3, "updates": [toys.MOST], "rule": [toys.MOST], "points": [[0.0, 0.0], [1.0, 1.0]]}
    good = {**found, "updates": [12]}
    numbers = {"data": "functions", "seeds": [1], "table": {"Beale": {"SGD": found, "Adam": good}}}
    shown = legend(picture("figures/toys", numbers))
    assert set(shown) == {"SGD: -, no rate arrives", "Adam: 12, rate 0.3"}
    numbers["table"]["Beale"].pop("Adam")
    assert "Beale: none. A legend" in toys.caption(numbers)

    def run(arrives):
        monkeypatch.setattr(asynchrony, "updates_to", lambda job: 100 if arrives(job) else None)
        return asynchrony.measure("mnist", Setting(quick=True))

    none = run(lambda job: job.batch != 8)
    (first, *others) = [arm for arm in none["arms"] if arm["kind"] == "batch"]
    assert (first["rate"], first["updates"]) == (None, [None, None])
    assert all(arm["rate"] is not None and arm["updates"] == [100, 100] for arm in others)
    shown = legend(picture("figures/asynchrony-mnist", none))
    assert "no rate arrives" in shown
    with pytest.raises(CommandError, match=r"one worker reaches 6 % at no rate from 0.025 to 0.8"):
        run(lambda _: False)


def test_a_finished_result_is_drawn_again(tmp_path):
    """By what was stored, without measuring."""
    (tmp_path / "figures").mkdir()
    claim = FIGURES["figures/accuracy-mnist"]
    draw_again(claim, {"figures": accuracy_numbers("mnist")}, tmp_path)
    assert (tmp_path / "figures/accuracy-mnist.png").read_bytes()[1:4] == b"PNG"
