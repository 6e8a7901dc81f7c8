"""`fastps-lab repro figures`: the quick set is drawn, --resume keeps results, and bad input is refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys

import pytest

from fastps_lab import cli
from fastps_lab.repro import catalogue, command
from fastps_lab.repro.claim import Claim, Setting, Verdict
from fastps_lab.repro.costs.costs import COMMITTED, read_costs
from fastps_lab.repro.figures import toys
from fastps_lab.repro.finished import Finished
from fastps_lab.repro.runner import measure

FIGURES = [sys.executable, "-m", "fastps_lab", "repro", "figures"]


def drawn(folder):
    """The files of figures in a folder."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [["toys"], pytest.param([], marks=pytest.mark.nightly)], ids=["one", "all"])
def test_the_quick_set_is_drawn(tmp_path, names):
    """What the figures are judged by holds; the page has pictures and settings."""
    done = subprocess.run(
        [*FIGURES, *names, "--quick", "--out", str(tmp_path)], capture_output=True, text=True, timeout=390
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    page = (tmp_path / "results.md").read_text()
    results = Finished(tmp_path / "results.jsonl").all
    drawn = catalogue.find(["figures", *names], quick=True)
    assert {result["name"] for result in results} == {figure.name for figure in drawn}
    for result in results:
        name = result["name"]
        assert f"HOLDS    {name}" in done.stdout
        assert f".]({name}.png)" in page.replace(" Holds.", ".")
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"
        assert result["caption"] in page
        assert f"[Numbers]({name}.csv). Settings: {result['figures']['settings']}" in page
        header, *rows = csv.reader((tmp_path / f"{name}.csv").read_text().splitlines())
        assert rows
        assert {len(row) for row in rows} == {len(header)}

    (again := tmp_path / "again/figures").mkdir(parents=True)
    measure(toys.CLAIMS[0], Setting(quick=True), again.parent)
    assert (again / "toys.csv").read_bytes() == (tmp_path / "figures/toys.csv").read_bytes()


# -- the frame, with figures that take no time ---------------------------------------------------------------


def simple(name, number, **more):
    """A figure that is one number."""

    def measured(setting):
        if number is None:
            raise KeyboardInterrupt
        return {
            "settings": "none",
            "seeds": [],
            "number": number + sum(n["number"] for n in setting.earlier.values()),
        }

    return Claim(
        name=f"figures/{name}",
        says=f"The number {name}.",
        source="a paper, figure 1",
        note="|nothing|",
        threshold="below 10",
        measure=measured,
        judge=lambda numbers: Verdict(numbers["number"] < 10, f"it is {numbers['number']}"),
        caption=lambda numbers: "a number",
        rows=lambda numbers: [("number",), (float(numbers["number"]),)],
        draw=lambda numbers, figure: figure.subplots().plot([numbers["number"]]),
        minutes=(1.0, 240.0),
        needs=(),
        spreads=True,
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
    assert "about 2.0 minutes" in said.out
    assert said.err == "fastps: stopped by Ctrl-C\n"
    assert drawn(tmp_path / "figures") == {"one.csv", "one.png"}
    assert "a number Differs from the paper: |nothing|." in (tmp_path / "results.md").read_text()

    (tmp_path / "figures/one.png").unlink()
    figures(simple("one", None), simple("two", 2, uses=("figures/one",)), simple("three", 30))
    assert run("two", "--quick", "--resume", *out) == 0
    said = capsys.readouterr().out
    assert "finished earlier: figures/one" in said
    assert (tmp_path / "figures/one.png").exists(), "a kept result is drawn again"
    assert "HOLDS    figures/two" in said
    assert (tmp_path / "figures/two.csv").read_text() == "number\n3\n", "the kept number is used"

    assert run("--quick", "--resume", *out) == 1, "a judge refuses the third"
    assert "FAILS    figures/three" in capsys.readouterr().out
    assert "| [figures/three](#figuresthree) | fails | it is 30 |" in (tmp_path / "results.md").read_text()


def test_only_results_of_the_same_kind_are_kept(tmp_path, figures, capsys):
    quick = ["--quick", "--out", str(tmp_path)]
    figures(simple("one", 1))
    assert run(*quick) == 0
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({**json.loads(COMMITTED.read_text()), "date": "1999-12-31"}))
    file = tmp_path / "results.jsonl"
    kept = json.loads(file.read_text())
    for options, change, is_kept in (
        (["--resume"], {}, True),
        ([], {}, False),
        (["--resume"], {"version": 0}, False),
        (["--resume", "--seed", "7"], {}, False),
        (["--resume", "--costs", str(costs)], {}, False),
        (["--resume"], {"figures": {}}, False),
    ):
        file.write_text(json.dumps({**kept, **change}) + "\n")
        capsys.readouterr()
        assert run(*quick, *options) == 0
        assert ("finished earlier: figures/one" in capsys.readouterr().out) == is_kept, (options, change)
        assert len(file.read_text().splitlines()) == 2 - is_kept


def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("FASTPS_DATA_DIR", raising=False)
    old = tmp_path / "old.json"
    old.write_text('{"version": 0}')
    file = tmp_path / "file"
    file.touch()
    cases = [
        (["toyz", "--quick"], "no figure 'toyz'; fastps-lab repro figures list shows all names"),
        (["accuracy-mnist"], "needs --dataset-dir DIR with mnist/ in it: train-images"),
        (["accuracy-mnist", "--dataset-dir", "nowhere"], "nowhere/mnist lacks train-images-idx3-ubyte.gz"),
        (["accuracy-cifar10", "--quick"], "accuracy-cifar10 has no quick form"),
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
    assert "figures/two: left out, needs no-such-package (pip install no-such-package)" in said
    assert "figures/two  (" not in said
    assert run("two", "--quick", *out) == 1
    assert "figures/two needs no-such-package: pip install no-such-package" in capsys.readouterr().err


def test_the_variable_names_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FASTPS_DATA_DIR", "/nowhere")
    assert run("accuracy-mnist", "--out", str(tmp_path)) == 1
    assert "/nowhere/mnist lacks" in capsys.readouterr().err


def test_the_list_names_every_figure_and_its_time(capsys):
    assert run("list") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in catalogue.FIGURES)
    assert sum(figure.minutes[1] for figure in catalogue.FIGURES.values()) <= 600


def test_measured_costs_are_written_where_they_can_be_read(tmp_path, monkeypatch, capsys):
    costs = dataclasses.replace(read_costs(), machine="another", load=3.0)
    monkeypatch.setattr(command, "measure_costs", lambda: costs)
    assert run("--measure", "--out", str(tmp_path)) == 0
    path = tmp_path / "costs.json"
    assert f"fastps-lab repro figures --costs {path}" in capsys.readouterr().out
    assert read_costs(path) == costs
