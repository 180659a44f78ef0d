"""Models of many kinds under the schemes: trained, or refused in one line, by one command."""

import math

import pytest

from splitcast.cli.main import main
from splitcast.schemes.schemes import SCHEMES
from splitcast.studies.zoo import ENTRIES, markdown, try_all


def test_the_table_has_what_people_have():
    assert len(ENTRIES) >= 16


def test_every_scheme_trains_a_table_or_says_why_not(tmp_path):
    cells = try_all(tmp_path, ["MLP on a table"])
    assert [cell.scheme for cell in cells] == list(SCHEMES)
    for cell in cells:
        assert "TRACEBACK" not in cell.reason and "\n" not in cell.reason
        assert cell.reason or (math.isfinite(cell.first) and math.isfinite(cell.last) and cell.first != cell.last)


def test_clients_with_models_of_their_own_are_tested_where_targets_are_maps(tmp_path):
    (cell,) = try_all(tmp_path, ["segmentation network"], ["psl-personal"])
    assert cell.last < cell.first


@pytest.mark.long
def test_one_command_writes_the_table(tmp_path, capsys):
    models = ["LSTM", "tied layers, across the cut", "segmentation network", "BERT (transformers)"]
    main(["zoo", "--models", *models, "--schemes", "sfl", "fl", "--out", str(tmp_path / "zoo"), "--quiet"])
    assert "8 trainings, 1 refused in one line" in capsys.readouterr().out
    lines = (tmp_path / "zoo" / "models.md").read_text().splitlines()
    assert lines[0] == "| model | task | sfl | fl |" and len(lines) == 2 + len(models) + 2
    assert "refused (1)" in lines[3] and lines[-1].startswith("1. cut: 2 separates")
    assert lines[2:6] == markdown(try_all(tmp_path, models, ["sfl", "fl"])).splitlines()[2:6]
