"""A server that dies and a cable that is pulled, on two sites in two networks; `failures.py` has all five."""

import signal

import pytest

pytest.importorskip("nvflare")

from failures import FAILURES, SITES, VICTIM, laboratory, trial
from test_deploy import left_behind

pytestmark = [pytest.mark.deploy, pytest.mark.long]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    root = tmp_path_factory.mktemp("failures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with laboratory(root, "call_timeout_s = 10\ndrop_after = 2", (SITES[0], VICTIM)) as made:
            yield made
    assert left_behind(root) == []


def whole(made):
    """All rounds in order, once, and the folder as it should be."""
    return made.faults == [] and [record.round for record in made.records] == list(range(1, made.rounds + 1))


def left_alone(made):
    """Rounds after which the site was not asked for a while."""
    return [record for _, record in made.after if "left alone" in (record.failures or {}).get(VICTIM, "")]


def killed(lab):
    """Its job stands still meanwhile: the watchdog must end it too, and on no machine has it finished by then."""
    lab.signal(signal.SIGSTOP, "server", "runner_process")
    lab.signal(signal.SIGKILL, "server", "server_train")


def test_a_run_survives_the_death_of_the_server(lab, tmp_path, monkeypatch):
    monkeypatch.setitem(FAILURES, "server killed", (killed, None))
    made = trial(lab, "server killed", tmp_path / "run", 80, at=12, over=lambda made: True)
    assert whole(made) and made.back is not None
    assert {record.round for _, record in made.after} >= {11, 12}  # from the checkpoint of round 10


def test_a_site_whose_cable_was_out_takes_part_again(lab, tmp_path):
    if not lab.nets:
        pytest.skip("network namespaces are not allowed here")
    made = trial(lab, "network cut", tmp_path / "run", 120, at=6, over=left_alone)
    assert whole(made) and made.again == 0 and left_alone(made)
    assert made.back is not None
