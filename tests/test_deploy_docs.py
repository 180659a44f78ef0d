"""The scheme, feedback and codec of `docs/extend.md` train on real FLARE sites as they stand there."""

import os
import sys

import pytest

pytest.importorskip("nvflare")

from splitcast.base.config import Config, with_values
from splitcast.deploy import processes, supervise
from splitcast.deploy.console import Operator
from splitcast.deploy.kits import make_kits
from splitcast.deploy.settings import load_deployment
from splitcast.run.loop import train
from splitcast.run.verify import verify
from test_deploy import free_port, left_behind
from test_deploy_attacks import write_deployment
from test_docs import fenced
from waiting import PATIENCE_S

MODULES = ("my_scheme", "my_home", "my_codec", "my_task", "my_optimiser", "my_model")
RUNS = {
    "feedback and codec": {"scheme": "my_scheme:RowsScheme", "downlink_codec": "my_codec:Sign"},
    "labels at home": {"scheme": "my_home:AtHome", "cut": 2},
    "everything": {
        "scheme": "my_scheme:RowsScheme",
        "task": "my_task:Ordinal",
        "optimizer": "my_optimiser:Signum",
        "momentum": 0.9,
        "lr": 0.001,
    },
}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Two sites that find the documented modules and may import them."""
    root = tmp_path_factory.mktemp("documented")
    for block in fenced("extend.md", "python"):
        name = block.splitlines()[0].removeprefix("# ")
        if name.removesuffix(".py") in MODULES:
            (root / name).write_text(block, encoding="utf-8")
    make_kits(write_deployment(root / "d.toml", free_port(), imports=MODULES, timeout_s=60), root / "kits")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")])))
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            processes.start(root / "kits")
            with Operator(root / "kits") as operator:
                supervise.wait_for_sites(operator, load_deployment(root / "kits/deployment.toml"), PATIENCE_S, 2)
            yield root / "kits"
        finally:
            processes.stop(root / "kits")
            for name in MODULES:
                sys.modules.pop(name, None)
            assert left_behind(root / "kits") == []


@pytest.mark.deploy
@pytest.mark.parametrize("name", RUNS)
def test_documented_parts_run_on_sites(live, name, tmp_path):
    config = with_values(Config(), clients=2, rounds=3, batch=8, arch="cnn-small", eval_every=3, **RUNS[name])
    summary = supervise.supervise(live, config, tmp_path / "run")
    here = train(config)
    assert summary["rounds"] == 3 and verify(tmp_path / "run") == []
    from splitcast.run.records import RunFolder

    for ours, theirs in zip(RunFolder(tmp_path / "run").rounds(), here.rounds, strict=True):
        assert ours.kinds == theirs.kinds and ours.failures is None
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
