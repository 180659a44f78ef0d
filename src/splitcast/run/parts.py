"""The parts that a configuration names: its data, who has which rows, its model, and the simulator made of them."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from splitcast import data
from splitcast.base.config import Config, DataConfig, leaves, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.cost.pace import EqualShares
from splitcast.cost.scenario import Scenario
from splitcast.cutting.auto import is_auto
from splitcast.cutting.policies import fixed_cut
from splitcast.data import Dataset
from splitcast.engine.asynchronous import AsyncSimulator
from splitcast.engine.simulator import Simulator
from splitcast.model import make_model, prepared, split
from splitcast.model.split import Blocks, SplitModel
from splitcast.model.vocabulary import check_padding, check_tokens
from splitcast.schemes.schemes import make_scheme, placed
from splitcast.training.placement import Placed
from splitcast.training.runtime import device_name
from splitcast.training.task import Task, fit_targets, make_task


def as_split(config: Config, model: Blocks | SplitModel, dataset: Dataset) -> SplitModel:
    """A model of the user's, cut for the samples of a data set."""
    return prepared(split(model, dataset.train_x[:64], config.model, config.lora), config)


def make_simulator(config: Config, dataset: Dataset, model: Blocks | SplitModel | None = None) -> Simulator:
    """The parts a configuration names, put together."""
    shape = tuple(dataset.train_x.shape[1:])
    if model is None:
        model = make_model(config, shape, dataset.classes, dataset.train_x.dtype)
    elif not isinstance(model, SplitModel):
        model = as_split(config, model, dataset)
    if model.input_shape != shape:
        raise SplitcastError(f"model: takes samples of {model.input_shape}, the data has {shape}")
    check_tokens(model, dataset.train_x, dataset.test_x)
    if dataset.writing and dataset.train_y.ndim == 1:
        check_padding(model, dataset.writing.tokenizer.padding)
    task = make_task(config.model.task, dataset.classes)
    task.check(model.smashed_shape(model.depth))
    dataset = fitted(dataset, task, model)
    placement = first_placement(config, model)
    parts = make_parts(config, dataset)
    made = (config, model, task, dataset.train_x, dataset.train_y, parts)
    if not config.train.wait_for:
        return Simulator(*made, placement=placement)
    return AsyncSimulator(*made, placement=placement, pace=EqualShares(Scenario.of(config, model, task)))


def fitted(dataset: Dataset, task: Task, model: SplitModel) -> Dataset:
    """The dataset with its targets as the task takes them, or a refusal."""
    shape = model.smashed_shape(model.depth)
    train_y, test_y = (fit_targets(task, getattr(dataset, name), shape, name) for name in ("train_y", "test_y"))
    return replace(dataset, train_y=train_y, test_y=test_y)


def load_data(config: Config) -> Dataset:
    """The data a configuration names."""
    return data.load(config.data, task=config.model.task, arch=config.model.arch)


def with_clients(config: Config, dataset: Dataset) -> Config:
    """The configuration with as many clients as the column has that tells them; any other number but the default is
    refused."""
    column = data.natural_column(config.data.partition)
    if not column:
        return config
    if column not in dataset.groups:
        known = ", ".join(dataset.groups) or "none"
        raise SplitcastError(f"partition: {dataset.name} has no column {column!r} of clients; it has {known}")
    count, asked = int(dataset.groups[column].max()) + 1, config.data.clients
    if asked not in (count, DataConfig().clients):
        raise SplitcastError(f"clients: {asked}, but column {column!r} has {count}; leave the number out")
    return with_values(config, clients=count)


def make_parts(config: Config, dataset: Dataset) -> list[np.ndarray]:
    """The rows of the training set that each client owns."""
    spread = config.data
    if column := data.natural_column(spread.partition):
        return data.natural(dataset.groups[column].numpy())
    return data.partition(
        dataset.train_y.numpy(),
        spread.clients,
        spread.partition,
        alpha=spread.alpha,
        classes_per_client=spread.classes_per_client,
        sizes=spread.sizes,
        rng=stream(config.train.seed, "data"),
    )


def first_placement(config: Config, model: SplitModel) -> Placed:
    """The placement of the first round, unless a policy chooses it."""
    scheme = make_scheme(config)
    if config.policy.policy == "fixed" or len(config.split.cuts) > 1:
        return placed(config, scheme, model.depth)
    fixed = fixed_cut(config.policy.policy, config.split.cuts[0])
    return scheme.place(config.split.cuts[0] if fixed is None else fixed, model.depth)


def resolved(config: Config) -> Config:
    """The configuration with what the scheme chooses for the cut written out: a record does not lean on defaults.

    Where a policy moves the cut, the choice moves along and stays open.

    >>> gb = with_values(Config(), scheme="sfl-gb", uplink_codec="int4")
    >>> resolved(gb).sfl_gb.rank, resolved(gb).split.uplink_codec, resolved(gb).split.downlink_codec
    (8, 'int4', 'int8')
    """
    config = with_values(config, device=device_name(config.train.device))
    if is_auto(config):  # the planner needs the model
        return config
    cut, cuts = fixed_cut(config.policy.policy, config.split.cuts[0]), config.split.cuts
    if cut is None or cut < 1 or min(cuts) < 1:  # refused where the model is known
        return config
    scheme = make_scheme(config)
    held = scheme.place(cut, sys.maxsize) if len(cuts) == 1 else placed(config, scheme, sys.maxsize)
    settings = scheme.at(held).settings()
    if config.policy.uplink_choices:  # chosen anew in every round
        settings.pop("uplink_codec", None)
    return with_values(config, **settings)


def chosen(config: Config, taken: Config | None = None) -> dict[str, Any]:
    """What `resolved` wrote out for the scheme, or a run has ``taken``, where the configuration left it open.

    >>> chosen(with_values(Config(), scheme="sfl-tc", uplink_codec="int4", task="next-token"))["downlink_codec"]
    'lloyd:2'
    """
    left = leaves(with_values(config, device=device_name(config.train.device)))
    return {name: value for name, value in leaves(taken or resolved(config)).items() if value != left[name]}
