"""Make the golden files: what splitcast at commit b973953 computes, to compare later versions with.

    PYTHONPATH=<clone of b973953>/src python tests/golden/make.py

writes beside this file

    golden.json    a list of cases: name, config (the text of config.toml), rounds (the records of rounds.jsonl)
    weights.npz    the averaged model after the last round of every case, float64 arrays named case/parameter
    runs/CASE/     run folders of 4 rounds; the case CASE-6 is the same configuration trained for 6 rounds

Everything is trained in float64, on one thread, with the model of `tiny_model.py`.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from splitcast import Config, train, with_values  # noqa: E402

SCHEMES = ("sfl-ga", "sfl", "psl", "epsl", "sfl-gb", "fl", "sl")
COMMON: dict[str, Any] = {
    "arch": "tiny_model:tiny",
    "dataset": "mnist-mini",
    "dtype": "float64",
    "clients": 4,
    "batch": 6,
    "rounds": 4,
    "eval_every": 2,
    "lr": 0.05,
}


def plain() -> dict[str, dict[str, Any]]:
    """Every scheme at every cut with 1 and 3 local steps; every second case has clients of unequal sizes."""
    cases: dict[str, dict[str, Any]] = {}
    for scheme in SCHEMES:
        for cut in (1, 2, 3, 4):
            for local_steps in (1, 3) if cut % 2 else (3, 1):
                sizes = "unequal" if len(cases) % 2 else "equal"
                values = {"scheme": scheme, "cut": cut, "local_steps": local_steps, "sizes": sizes}
                cases[f"{scheme}-cut{cut}-steps{local_steps}"] = values
    return cases


MIXED: dict[str, dict[str, Any]] = {
    "sfl-ga-participation-momentum": {"cut": 2, "local_steps": 3, "participation": 0.7, "momentum": 0.9},
    "sfl-ga-identical-fp16-int8": {"client_update": "identical", "uplink_codec": "fp16", "downlink_codec": "int8"},
    "sfl-ga-sync2-dropout-dirichlet": {"cut": 3, "sync_every": 2, "dropout": 0.3, "partition": "dirichlet"},
    "sfl-ga-random-momentum": {"policy": "random", "momentum": 0.9, "sizes": "unequal"},
    "sfl-ga-greedy": {"policy": "greedy", "gamma_weight": 1e-4, "sizes": "unequal"},
    "sfl-ga-greedy-free": {"policy": "greedy", "gamma_weight": 1e-3, "charge_migration": False, "local_steps": 3},
    "sfl-ga-greedy-gamma": {"policy": "greedy", "gamma_draws": 2, "gamma_weight": 1e-5, "dropout": 0.3},
    "sfl-sync0-int4": {"cut": 2, "sync_every": 0, "uplink_codec": "int4", "downlink_codec": "int4", "local_steps": 3},
    "sfl-sync2-participation-shards": {
        "cut": 3,
        "sync_every": 2,
        "participation": 0.7,
        "momentum": 0.9,
        "partition": "shards",
    },
    "sfl-random-dropout": {"policy": "random", "dropout": 0.3, "local_steps": 3, "sizes": "unequal"},
    "sfl-random-identical-sync2": {
        "policy": "random",
        "client_update": "identical",
        "sync_every": 2,
        "momentum": 0.9,
        "uplink_codec": "int2",
    },
    "sfl-equal-paper": {"cut": 4, "allocation": "equal", "workload": "paper", "downlink_codec": "fp16"},
    "psl-int2-fp16-dropout": {"cut": 2, "uplink_codec": "int2", "downlink_codec": "fp16", "dropout": 0.3},
    "psl-identical-sync2": {
        "cut": 3,
        "client_update": "identical",
        "sync_every": 2,
        "momentum": 0.9,
        "local_steps": 3,
        "sizes": "unequal",
    },
    "psl-random-free": {"policy": "random", "charge_migration": False, "participation": 0.7, "momentum": 0.9},
    "psl-equal-shards": {"cut": 4, "allocation": "equal", "partition": "shards", "sizes": "unequal"},
    "epsl-quarter-participation-dirichlet": {
        "cut": 2,
        "aggregate": 0.25,
        "participation": 0.7,
        "partition": "dirichlet",
        "workload": "paper",
    },
    "epsl-quarter-identical-int8": {
        "cut": 3,
        "aggregate": 0.25,
        "client_update": "identical",
        "momentum": 0.9,
        "uplink_codec": "int8",
        "downlink_codec": "int8",
    },
    "epsl-greedy-momentum-fp16": {
        "policy": "greedy",
        "gamma_weight": 3e-3,
        "aggregate": 0.25,
        "momentum": 0.9,
        "uplink_codec": "fp16",
        "downlink_codec": "fp16",
        "sizes": "unequal",
    },
    "sfl-gb-rank3-participation": {"rank": 3, "participation": 0.7, "downlink_codec": "fp16", "uplink_codec": "fp16"},
    "sfl-gb-drop-dirichlet": {"cut": 2, "drop": 0.2, "local_steps": 3, "partition": "dirichlet", "sizes": "unequal"},
    "sfl-gb-identical-sync0-int4": {
        "cut": 4,
        "client_update": "identical",
        "sync_every": 0,
        "downlink_codec": "int4",
        "dropout": 0.3,
    },
    "sfl-gb-random-momentum": {"policy": "random", "momentum": 0.9, "sizes": "unequal"},
    "sfl-gb-random-rank4": {"policy": "random", "rank": 4, "momentum": 0.9, "sizes": "unequal"},
    "sfl-gb-cut2-rank4": {"cut": 2, "rank": 4},
    "sfl-gb-cut2-rank4-unequal": {"cut": 2, "rank": 4, "local_steps": 3, "sizes": "unequal"},
    "sfl-gb-cut3-rank4": {"cut": 3, "rank": 4, "local_steps": 3},
    "sfl-gb-greedy-gamma": {
        "policy": "greedy",
        "gamma_draws": 2,
        "gamma_weight": 0.01,
        "drop": 0.1,
        "uplink_codec": "fp16",
        "downlink_codec": "fp16",
        "sync_every": 0,
    },
    "fl-participation-momentum-dirichlet": {
        "participation": 0.7,
        "momentum": 0.9,
        "partition": "dirichlet",
        "sizes": "unequal",
    },
    "fl-dropout-shards": {
        "dropout": 0.3,
        "partition": "shards",
        "local_steps": 3,
        "allocation": "equal",
        "workload": "paper",
    },
    "sl-random": {"policy": "random", "local_steps": 3, "sizes": "unequal"},
    "sl-participation-momentum-int8": {
        "cut": 2,
        "participation": 0.7,
        "momentum": 0.9,
        "uplink_codec": "int8",
        "downlink_codec": "int8",
    },
    "sl-greedy-free-dropout": {
        "policy": "greedy",
        "gamma_weight": 7e-4,
        "charge_migration": False,
        "momentum": 0.9,
        "dropout": 0.3,
    },
}

RUNS: dict[str, dict[str, Any]] = {
    "sfl-ga-run": {"policy": "random", "momentum": 0.9, "sizes": "unequal"},
    "sfl-gb-run": {"cut": 2, "rank": 3, "sync_every": 3, "local_steps": 3, "momentum": 0.9, "participation": 0.7},
    "psl-run": {"cut": 3, "local_steps": 3, "sizes": "unequal"},
}


def scheme_of(name: str) -> str:
    return max((scheme for scheme in SCHEMES if name.startswith(f"{scheme}-")), key=len)


def trained(name: str, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The case as it is stored, and its final weights."""
    config = with_values(Config(), **COMMON | {"scheme": scheme_of(name)} | values)
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, Path(folder))
        text = (Path(folder) / "config.toml").read_text(encoding="utf-8")
        lines = (Path(folder) / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    case = {"name": name, "config": text, "rounds": [json.loads(line) for line in lines]}
    weights = result.simulator.state.averaged(result.simulator.weights)
    return case, {f"{name}/{key}": value.detach().numpy() for key, value in weights.items()}


def main() -> None:
    torch.set_num_threads(1)
    resumable = {name: values | {"checkpoint_every": 2} for name, values in RUNS.items()}
    longer = {f"{name}-6": values | {"rounds": 6} for name, values in resumable.items()}
    cases: list[dict[str, Any]] = []
    weights: dict[str, np.ndarray] = {}
    for name, values in (plain() | MIXED | longer).items():
        case, final = trained(name, values)
        cases.append(case)
        weights |= final
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (HERE / "golden.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    np.savez_compressed(HERE / "weights.npz", **weights)

    shutil.rmtree(HERE / "runs", ignore_errors=True)
    for name, values in resumable.items():
        train(with_values(Config(), **COMMON | {"scheme": scheme_of(name)} | values), HERE / "runs" / name)


if __name__ == "__main__":
    main()
