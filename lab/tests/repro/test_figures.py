"""`fastps-lab repro figures`: the quick set is drawn, finished figures are kept, and bad input is refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys

import pytest

from fastps_lab import cli
from fastps_lab.repro.claim import Setting, Verdict
from fastps_lab.repro.figures import catalogue, command, toys
from fastps_lab.repro.figures.costs.costs import COMMITTED, read_costs
from fastps_lab.repro.figures.figure import VERSION, Figure, Run
from fastps_lab.repro.figures.results import measure

FIGURES = [sys.executable, "-m", "fastps_lab", "repro", "figures"]


def each(function, arguments):
    """Calls the function here, one argument at a time."""
    return [function(argument) for argument in arguments]


def quick(seed=0, **more):
    return Run(Setting(quick=True, seed=seed), read_costs(), each, **more)


def drawn(folder):
    """The files of figures in a folder."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [["toys"], pytest.param([], marks=pytest.mark.nightly)], ids=["one", "all"])
def test_the_quick_set_is_drawn(tmp_path, names):
    """What the figures are judged by holds; the page has pictures and commands."""
    done = subprocess.run(
        [*FIGURES, *names, "--quick", "--out", str(tmp_path)], capture_output=True, text=True, timeout=390
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures = catalogue.select(names, "quick")
    out = tmp_path / "figures"
    names = {f"{figure.name}.{kind}" for figure in figures for kind in ("json", "csv", "png")}
    assert drawn(out) - {"runs"} == names | {"index.html"}
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(figures)
    for figure in figures:
        result = json.loads((out / f"{figure.name}.json").read_text())
        assert result["version"] == VERSION
        assert f"HOLDS {figure.name}" in done.stdout
        assert f"fastps-lab repro figures {figure.name} --quick" in page
        assert result["numbers"]["settings"].split("<")[0][:40] in page
        header, *rows = csv.reader((out / f"{figure.name}.csv").read_text().splitlines())
        assert rows
        assert {len(row) for row in rows} == {len(header)}

    again = tmp_path / "again"
    again.mkdir()
    measure(toys.FIGURES[0], quick(), again)
    assert (again / "toys.csv").read_bytes() == (out / "toys.csv").read_bytes()


# -- the frame, with figures that take no time ---------------------------------------------------------------


def simple(name, number, **more):
    """A figure that is one number."""

    def measured(run):
        if number is None:
            raise KeyboardInterrupt
        return {
            "settings": "none",
            "seeds": [],
            "number": number + sum(n["number"] for n in run.earlier.values()),
        }

    return Figure(
        name=name,
        title=f"The number {name}",
        source="a paper, figure 1",
        differs="<nothing>",
        threshold="below 10",
        measure=measured,
        judge=lambda numbers: Verdict(numbers["number"] < 10, f"it is {numbers['number']}"),
        caption=lambda numbers: "a number",
        rows=lambda numbers: [("number",), (float(numbers["number"]),)],
        draw=lambda numbers, figure: figure.subplots().plot([numbers["number"]]),
        minutes=(1.0, 240.0),
        **more,
    )


@pytest.fixture
def figures(monkeypatch):
    """Replaces the figures of the command."""

    def replace(*shown):
        monkeypatch.setattr(catalogue, "FIGURES", {figure.name: figure for figure in shown})

    return replace


def run(*arguments):
    return cli.main(["repro", "figures", *arguments, "--jobs", "1"])


def test_finished_figures_are_kept_and_an_interrupted_one_is_drawn(tmp_path, figures, capsys):
    out = ["--out", str(tmp_path)]
    figures(simple("one", 1), simple("two", None))
    assert run("--quick", *out) == 130
    said = capsys.readouterr()
    assert "one: about 1.0 min" in said.out
    assert "about 2.0 minutes with 1 processes" in said.out
    assert said.err == "fastps: stopped by Ctrl-C\n"
    assert drawn(tmp_path / "figures") == {"one.json", "one.csv", "one.png", "index.html"}

    figures(simple("one", None), simple("two", 2, uses=("one",)), simple("three", 30))
    assert run("two", "--quick", *out) == 0
    said = capsys.readouterr().out
    assert "one: finished earlier" in said
    assert "HOLDS two" in said
    assert (tmp_path / "figures/two.csv").read_text() == "number\n3\n", "the kept number is used"
    assert "&lt;nothing&gt;" in (tmp_path / "figures/index.html").read_text()

    assert run("--quick", *out) == 1, "a judge refuses the third"
    said = capsys.readouterr().out
    assert "FAILS three" in said
    assert "The judge refuses" in (tmp_path / "figures/index.html").read_text()


def test_results_of_another_kind_are_refused(tmp_path, figures, capsys):
    out = ["--out", str(tmp_path)]
    figures(simple("one", 1))
    assert run("--quick", *out) == 0
    path = tmp_path / "figures/one.json"
    kept = json.loads(path.read_text())
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({**json.loads(COMMITTED.read_text()), "date": "1999-12-31"}))
    changes = [
        ({"version": VERSION + 1}, [], f"is of another version: expected {VERSION}, got {VERSION + 1}"),
        ({"seed": 7}, [], "is of another seed: expected 0, got 7"),
        ({}, ["--costs", str(costs)], "is of another costs: expected"),
        ("[", [], "is no result of a figure"),
    ]
    for change, options, text in changes:
        path.write_text(change if isinstance(change, str) else json.dumps({**kept, **change}))
        capsys.readouterr()
        assert run("--quick", *options, *out) == 1
        said = capsys.readouterr().err
        assert text in said
        assert "choose another --out, or remove it" in said
        assert len(said.splitlines()) == 1


def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("FASTPS_DATA_DIR", raising=False)
    old = tmp_path / "old.json"
    old.write_text('{"version": 0}')
    file = tmp_path / "file"
    file.touch()
    cases = [
        (["toyz", "--quick"], "no figure 'toyz'; fastps-lab repro figures list shows all names"),
        (["accuracy-mnist"], "needs FASTPS_DATA_DIR or --dataset-dir DIR with mnist/ in it: train-images"),
        (["accuracy-mnist", "--dataset-dir", "nowhere"], "nowhere/mnist lacks train-images-idx3-ubyte.gz"),
        (["accuracy-cifar10", "--quick"], "accuracy-cifar10 has no quick form"),
        (["toys", "--json"], "--json is for claims: each figure has a .json file"),
        (["toys", "--quick", "--costs", "nowhere"], "--costs nowhere cannot be read"),
        (["toys", "--quick", "--costs", str(old)], "has costs of version 0, expected 2"),
        (["toys", "--quick", "--out", str(file)], "choose a folder that can be written"),
    ]
    for arguments, text in cases:
        out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
        assert run(*arguments, *out) == 1
        said = capsys.readouterr().err
        assert text in said
        assert len(said.splitlines()) == 1


def test_figures_whose_packages_are_missing_are_left_out_of_the_quick_set(tmp_path, figures, capsys):
    out = ["--out", str(tmp_path)]
    figures(simple("one", 1), simple("two", 2, packages=("no-such-package",)))
    assert run("--quick", *out) == 0
    said = capsys.readouterr().out
    assert "two: left out, needs no-such-package (pip install no-such-package)" in said
    assert "HOLDS two" not in said
    assert run("two", "--quick", *out) == 1
    assert "two needs no-such-package: pip install no-such-package" in capsys.readouterr().err


def test_options_of_figures_are_refused_for_claims(capsys):
    for options in (["--measure"], ["--costs", "FILE"]):
        assert cli.main(["repro", "nesterov", "--quick", *options]) == 1
        assert "--measure and --costs are for figures" in capsys.readouterr().err


def test_the_variable_names_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FASTPS_DATA_DIR", "/nowhere")
    assert run("accuracy-mnist", "--out", str(tmp_path)) == 1
    assert "/nowhere/mnist lacks" in capsys.readouterr().err


def test_the_list_names_every_figure_and_its_time(capsys):
    assert run("list") == 0
    listed = capsys.readouterr().out
    assert all(f"{name}\n" in listed for name in catalogue.FIGURES)
    assert sum(figure.minutes[1] for figure in catalogue.FIGURES.values()) <= 600


def test_measured_costs_are_written_where_they_can_be_read(tmp_path, monkeypatch, capsys):
    costs = dataclasses.replace(read_costs(), machine="another", load=3.0)
    monkeypatch.setattr(command, "measure_costs", lambda: costs)
    assert run("--measure", "--out", str(tmp_path)) == 0
    path = tmp_path / "figures/costs.json"
    assert f"fastps-lab repro figures --costs {path}" in capsys.readouterr().out
    assert read_costs(path) == costs
