"""Weights of P1 in seconds, from run folders: what a unit of Γ, or of the error of a format, costs a round.

If rounds to an accuracy grow as T₀ + r x, with x either of them, and a round takes l̄ seconds, a round at x costs
r x l̄ / T₀ seconds of further rounds (`cost.objective.weight_of_gamma`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.objective import gamma_per_cut, weight_of_gamma
from splitcast.cost.privacy import client_fraction
from splitcast.cutting.policies import fixed_cut
from splitcast.run.headline import headline
from splitcast.run.parts import load_data, make_simulator, with_clients
from splitcast.run.records import RunFolder
from splitcast.run.selecting import measure_errors
from splitcast.schemes.schemes import make_scheme
from splitcast.studies.plan import scenario_of
from splitcast.studies.target import all_reach, spent, to_reach


def gamma_weight(runs: Sequence[Path], target: float | None = None, gamma: Sequence[float] = ()) -> float:
    """w of P1, from run folders of trainings that differ in their cut, and in the seed.

    Rounds to the first test as good as ``target`` (default: the best round number that all reach), mean over the seeds
    of a cut; l̄ is the mean over the runs of the seconds of a round until then. Γ of every cut is ``gamma``, else what
    the runs are configured with.
    """
    configs = _alike(runs, "cut and seed", cut=1, policy="fixed", seed=0)
    scenario = scenario_of(with_values(configs[0], cut=1, policy="fixed"))
    places = scenario.placements()
    known = gamma_per_cut(
        gamma or scenario.config.network.gamma, [client_fraction(scenario.model, place) for place in places]
    )
    at = {place.cut: float(value) for place, value in zip(places, known, strict=True)}

    def of(path: Path, config: Config) -> float:
        cut = _cut(config)
        if cut not in at:
            raise SplitcastError(f"runs: {path} has no fixed cut of 1..{len(at)} for all clients")
        return at[cut]

    return _weight(runs, configs, target, of, "gamma")


def error_weight(runs: Sequence[Path], target: float | None = None, errors: Mapping[str, float] | None = None) -> float:
    """p, the seconds of a unit of error of a format, from run folders of trainings that differ in `uplink_codec`, and
    in the seed; as `gamma_weight`. ``errors`` by the name of the format, else measured as trainings do."""
    configs = _alike(runs, "uplink_codec and seed", uplink_codec="auto", seed=0)
    names = list(dict.fromkeys(_format(config) for config in configs))
    if (cut := _cut(configs[0])) is None:
        raise SplitcastError(f"runs: {runs[0]} has no fixed cut for all clients")
    known = dict(errors) if errors else _measured(configs[0], names, cut)
    if lacking := [name for name in names if name not in known]:
        raise SplitcastError(f"errors: none for {lacking[0]!r}; give one for each of {', '.join(names)}")
    return _weight(runs, configs, target, lambda path, config: known[_format(config)], "errors")


def _alike(runs: Sequence[Path], differ: str, **neutral: object) -> list[Config]:
    configs = [RunFolder(path).config() for path in runs]
    if len({repr(with_values(config, **neutral)) for config in configs}) != 1:
        raise SplitcastError(f"runs: must be two or more that differ in {differ} only")
    return configs


def _cut(config: Config) -> int | None:
    cuts = config.split.cuts
    return fixed_cut(config.policy.policy, cuts[0]) if len(cuts) == 1 else None


def _format(config: Config) -> str:
    named = config.split.uplink_codec
    return make_scheme(config).uplink.name if named == "auto" else named


def _measured(config: Config, names: Sequence[str], cut: int) -> dict[str, float]:
    dataset = load_data(config)
    config = with_clients(with_values(config, uplink_codec="auto", uplink_choices=names), dataset)
    simulator = make_simulator(config, dataset)
    found = np.array(measure_errors(config, simulator, dataset)).reshape(len(names), -1)
    return dict(zip(names, found[:, cut - 1].tolist(), strict=True))


def _weight(
    runs: Sequence[Path],
    configs: Sequence[Config],
    target: float | None,
    value: Callable[[Path, Config], float],
    name: str,
) -> float:
    records = [RunFolder(path).rounds() for path in runs]
    judged = headline(configs[0], records[0])
    goal = all_reach(records, judged) if target is None else target
    rounds, seconds = defaultdict[float, list[float]](list), list[float]()
    for path, config, found in zip(runs, configs, records, strict=True):
        x = value(path, config)
        if (reach := to_reach(found, goal, judged)) is None:
            raise SplitcastError(f"target: {path} never gets to {judged.goal(goal)} in {spent(found).rounds} rounds")
        rounds[x].append(reach.rounds)
        seconds.append(reach.seconds / reach.rounds)
    means = [float(np.mean(each)) for each in rounds.values()]
    return weight_of_gamma(list(rounds), means, float(np.mean(seconds)), name)
