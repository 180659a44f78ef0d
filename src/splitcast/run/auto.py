"""Cuts that a training takes from the planner before its first round (`cutting.auto`), and where they are kept."""

from splitcast.base.config import Config, with_values
from splitcast.cost.scenario import Scenario
from splitcast.cutting.auto import is_auto, open_cut, with_cuts
from splitcast.data import Dataset
from splitcast.model import make_model
from splitcast.model.split import SplitModel
from splitcast.run.records import RunFolder
from splitcast.training.task import make_task


def decided(config: Config, dataset: Dataset, model: SplitModel | None = None) -> Config:
    """The configuration with numbers in place of ``cut = "auto"``, for these data, and this model if one is given."""
    if not is_auto(config):
        return config
    if model is None:
        shape = tuple(dataset.train_x.shape[1:])
        model = make_model(open_cut(config), shape, dataset.classes, dataset.train_x.dtype, shapes_only=True)
    return with_cuts(config, Scenario.of(open_cut(config), model, make_task(config.model.task, dataset.classes)))


def as_begun(config: Config, folder: RunFolder) -> Config:
    """The configuration with the cuts of a run that has begun in place of auto: it goes on with these."""
    return with_values(config, cut=folder.config().split.cut) if is_auto(config) else config
