"""Runs that differ only in the seed: one line with a band, one row with an interval, in figures, tables and pages."""

import json
from statistics import fmean

import pytest

from splitcast.base.config import Config, with_values
from splitcast.cli.main import main
from splitcast.run.records import RunFolder
from splitcast.schemes.schemes import SCHEMES
from splitcast.studies.compare import compare, rows
from splitcast.studies.curves import COLOURS, band, looks
from splitcast.studies.report import write_report
from splitcast.studies.report.document import document
from splitcast.studies.report.runs import read_runs
from test_report import TINY, Browser, chromium, record, write_run  # noqa: F401


def rounds_of(*values, mb=4.0):
    """Rounds with these accuracies; None where there was no test."""
    return [
        record(t, test_accuracy=value, up_bytes=int(1e6 * mb), down_bytes=0, kinds={"up.smashed": int(1e6 * mb)})
        for t, value in enumerate(values, start=1)
    ]


def test_a_band_is_over_the_rounds_in_which_all_were_rounds_of():
    runs = [rounds_of(None, 0.2, None, 0.6, mb=4.0), rounds_of(0.1, 0.4, 0.5, 0.4, mb=2.0)]
    found = band(runs, "MB")
    assert found.x == [6.0, 12.0]  # means of 8 and 4, of 16 and 8
    assert found.mean == pytest.approx([30, 50])
    assert (found.low, found.high) == ([20, 40], [40, 60])
    assert band(runs, "rounds").x == [2, 4]


def test_every_scheme_has_a_look_of_its_own():
    names = list(SCHEMES)
    alone = {name: looks([name, "another"])[0] for name in names}
    assert looks(names) == [alone[name] for name in names] and len(set(alone.values())) == len(names)
    assert looks(names[::-1])[::-1] == looks(names)
    assert looks(["my:Scheme", names[0]])[0] == alone[names[1]]  # the first place that is left
    assert len(set(looks(["sfl"] * 8))) == 8 and {look.colour for look in looks(["sfl"] * 8)} == set(range(8))


def test_rows_are_means_over_seeds():
    runs = {"a": [rounds_of(0.5, 0.7, 0.9), rounds_of(0.5, 0.8, 0.8, mb=2.0)], "b": [rounds_of(0.9, 0.9, 0.7)] * 2}
    target, (a, b) = rows(runs)
    assert target == 0.8 and (a.n, a.value) == (2, pytest.approx(0.85))
    assert a.half == pytest.approx(12.7062 * 0.05)  # t(1) s / sqrt(2), s = 0.1 / sqrt(2)
    assert (a.rounds_to_target, a.megabytes_to_target) == (2.5, 8.0) and b.half == 0
    assert rows(runs, 0.85)[1][0].rounds_to_target is None  # one of the seeds never gets there


@pytest.mark.long
def test_compare_with_seeds_keeps_what_is_there_and_draws_bands(tmp_path, capsys):
    tiny = ["--arch", "cnn-small", "--rounds", "2", "--batch", "4", "--clients", "4", "--eval-every", "1"]
    command = ["compare", "sfl", "psl", *tiny, "--out", str(tmp_path), "--quiet"]
    main([*command, "--json"])
    alone = json.loads(capsys.readouterr().out)["rows"]
    assert [row["n"] for row in alone] == [1, 1] and alone[0]["half"] is None
    first = (tmp_path / "sfl" / "summary.json").stat().st_mtime_ns
    main([*command, "--seeds", "3", "--json"])
    found = json.loads(capsys.readouterr().out)["rows"]
    assert (tmp_path / "sfl" / "summary.json").stat().st_mtime_ns == first
    folders = [RunFolder(tmp_path / name) for name in ("psl", "psl,seed=1", "psl,seed=2")]
    assert [folder.config().train.seed for folder in folders] == [0, 1, 2]
    ends = [folder.rounds()[-1].test_accuracy for folder in folders]
    assert len(set(ends)) > 1 and found[1]["accuracy"] == pytest.approx(fmean(ends)) and found[1]["n"] == 3
    main([*command, "--seeds", "3"])
    assert " ± " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--seeds", "0"])
    assert "seeds: 0; must be 1..1000" in capsys.readouterr().err


def seeds(folder, scheme, *runs, finished=True, **values):
    for seed, records in enumerate(runs):
        config = with_values(TINY, scheme=scheme, seed=seed, **values)
        name = f"{scheme},seed={seed}" if seed else scheme
        write_run(folder / name, config, records, {"wall_seconds": 1.5} if finished else None)


def test_a_report_groups_finished_runs_that_differ_in_the_seed(tmp_path):
    seeds(tmp_path, "sfl", rounds_of(0.5, 0.9), rounds_of(0.5, 0.7, mb=2.0))
    seeds(tmp_path, "psl", rounds_of(0.5, 0.6), rounds_of(0.4, 0.8), finished=False)
    write_run(tmp_path / "again", with_values(TINY, scheme="sfl"), rounds_of(0.1, 0.2), {"wall_seconds": 1.0})
    made = document(read_runs([tmp_path]))["runs"]
    assert [(run["name"], run["n"]) for run in made] == [("again", 2), ("psl", 1), ("psl,seed=1", 1), ("sfl", 1)]
    (tmp_path / "again" / "config.toml").unlink()  # two of one seed: the second stays alone
    again, *_, sfl = document(read_runs([tmp_path]))["runs"]
    assert (sfl["name"], sfl["n"], sfl["config"]["train.seed"]) == ("sfl", 2, [0, 1]) and again["name"] == "psl"
    assert sfl["columns"]["mb"] == [3.0, 6.0] and sfl["columns"]["test_accuracy"] == pytest.approx([0.5, 0.8])
    assert sfl["edges"]["test_accuracy"] == {"low": [0.5, 0.7], "high": [0.5, 0.9]}
    assert sfl["value"] == pytest.approx(0.8) and sfl["half"] == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert sfl["kinds"] == {"up.smashed": 6e6} and sfl["wall_seconds"] == 3.0
    assert [line.partition("--seed")[2] for line in sfl["command"].splitlines()] == ["", " 1"]


def test_the_page_has_bands_and_the_numbers_of_compare(chromium, tmp_path):  # noqa: F811
    seeds(tmp_path, "psl", rounds_of(0.5, 0.7, 0.9), rounds_of(0.5, 0.8, 0.8, mb=2.0), rounds_of(0.6, 0.7, 0.85))
    seeds(tmp_path, "sfl", rounds_of(0.4, 0.8, 0.9), rounds_of(0.3, 0.6, 0.8))
    browser = Browser(chromium, write_report([tmp_path]))
    places = list(SCHEMES)
    assert browser.lines("learning") == {COLOURS[places.index(name)] for name in ("psl", "sfl")}
    areas = "document.querySelectorAll('[data-chart=learning] path[fill-opacity=\"0.16\"]').length"
    assert browser.js(areas) == 2
    assert [chip.text for chip in browser.all("#runs button")] == ["psl ×3", "sfl ×2"]
    first, second = browser.rows("#table tbody")
    assert "n = 3" in first[0] and first[1] == "85.0 ± 12 %" and first[6:8] == ["2.667", "9.333"]
    assert "n = 2" in second[0] and second[6] == "2.5"
    assert "psl, mean of 3 ends at" in browser.find("[data-chart=learning] [role=img]").get_attribute("aria-label")
    assert "0, 1, 2" in browser.find("#config").text
    browser.find("#logx").click()
    browser.find("[data-chart=learning] [data-value=loss]").click()
    browser.find("#logy").click()
    assert browser.js(areas) == 2
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.long
def test_compare_in_python_gives_rounds_by_scheme_and_seed(tmp_path):
    config = with_values(Config(), arch="cnn-small", rounds=1, batch=4, clients=2, seed=5)
    runs = compare(config, ["fl"], tmp_path, seeds=2)
    assert [len(records) for records in runs["fl"]] == [1, 1] and runs["fl"][0] != runs["fl"][1]
    assert RunFolder(tmp_path / "fl,seed=6").rounds() == runs["fl"][1]
