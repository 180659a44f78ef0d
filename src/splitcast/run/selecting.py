"""The cell in which rounds take time, and who chooses cut and format of every round."""

from collections.abc import Sequence
from dataclasses import replace

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.cost.scenario import RoundClock, Scenario
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.formats import measures
from splitcast.cutting.policies import CutSelector, fixed_cut
from splitcast.cutting.reassign import Reassign, period
from splitcast.data import Dataset
from splitcast.engine.engine import Engine
from splitcast.engine.simulator import Simulator
from splitcast.run.parts import make_parts
from splitcast.run.records import RunFolder
from splitcast.schemes.schemes import make_scheme
from splitcast.theory import estimate_gamma
from splitcast.theory.distortion import relative_errors
from splitcast.training.placement import Placed


def reachable(config: Config, engine: Engine, clock: RoundClock) -> Sequence[Placed]:
    """Where blocks are if nobody moves them; policies and assignments keep to the memory of clients by themselves."""
    moves = period(config.policy.policy) or fixed_cut(config.policy.policy, config.split.cuts[0]) is None
    return [] if moves else [engine.state.placement]


def make_clock(config: Config, engine: Engine) -> RoundClock:
    """The cell in which the engine's rounds take time."""
    scenario = Scenario.of(config, engine.model, engine.task)
    if config.policy.uplink_choices or fixed_cut(config.policy.policy, config.split.cuts[0]) is None:
        scenario.channel.at(config.train.rounds)
    else:
        scenario.check(engine.state.placement, config.train.rounds)
    return RoundClock(scenario)


def make_selector(
    config: Config, engine: Engine, clock: RoundClock, dataset: Dataset, folder: RunFolder | None = None
) -> CutSelector | Reassign | None:
    """Who chooses cut and format of every round; None if both are fixed. A folder may hold what was measured before."""
    choice = config.policy
    if choice.gamma_draws and config.network.gamma:
        raise SplitcastError(f"gamma_draws: {choice.gamma_draws}, but gamma is given; leave one of them out")
    if fixed_cut(choice.policy, config.split.cuts[0]) is not None and not choice.uplink_choices:
        return None
    scenario = clock.scenario
    if scenario.scheme.fixed_cut:
        raise SplitcastError(f"policy: {choice.policy!r} moves the cut; {scenario.scheme.name} needs fixed")
    if period(choice.policy):
        if choice.gamma_draws:
            raise SplitcastError(f"gamma_draws: {choice.gamma_draws}, but {choice.policy} weighs seconds; leave it out")
        return Reassign(scenario, choice.policy, charge=choice.charge_migration)
    if choice.gamma_draws:
        if not isinstance(engine, Simulator):
            raise SplitcastError("gamma_draws: measuring needs all data in one place; give gamma instead")
        gamma = folder.measured("gamma") if folder else ()
        config = with_values(config, gamma=gamma or measure_gamma(config, engine, dataset))
    if measures(choice):
        if not isinstance(engine, Simulator):
            raise SplitcastError("uplink_choices: measuring their errors needs all data here; give uplink_errors")
        errors = folder.measured("errors") if folder else ()
        config = with_values(config, uplink_errors=errors or measure_errors(config, engine, dataset))
    scenario = replace(scenario, config=config)
    world = CutCosts(scenario, charge_moves=choice.charge_migration)
    return CutSelector.of(world, choice.policy, config.train.rounds, config.split.cuts[0])


def measure_gamma(config: Config, simulator: Simulator, dataset: Dataset) -> tuple[float, ...]:
    """Gamma(phi(v)) of every cut at the initial weights, from the clients' own data and the scheme's program."""
    model, scheme = simulator.model, make_scheme(config)
    found = estimate_gamma(
        model,
        simulator.task,
        simulator.initial().params,
        simulator.x,
        simulator.y,
        make_parts(config, dataset),
        config.train.batch,
        config.policy.gamma_draws,
        config.train.seed,
        [scheme.at(scheme.place(cut, model.depth)) for cut in model.cuts],
    )
    return found.fitted


def measure_errors(config: Config, simulator: Simulator, dataset: Dataset) -> tuple[float, ...]:
    """e(v, f) of every format and cut at the initial weights (`theory.distortion`), format by format."""
    model, scheme = simulator.model, make_scheme(config)
    places = dict.fromkeys(scheme.place(cut, model.depth) for cut in scheme.cuts(model.depth))
    found = relative_errors(
        model,
        simulator.initial().everything(),
        simulator.x,
        make_parts(config, dataset),
        config.train.batch,
        config.policy.error_draws,
        config.train.seed,
        [place.segments[0].stop for place in places],
        [codec(name, "uplink_choices") for name in config.policy.uplink_choices],
        simulator.kit.defence,
    )
    return tuple(found.ravel().tolist())
