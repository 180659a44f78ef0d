"""One contestant of `splitcast bench peers`, in a process of its own: python racers.py NAME CLIENTS BATCH ROUNDS.

FedAvg with one local step, of the paper's CNN on random images: every client holds one batch. The same start and the
same batches give the same weights in every framework, which is checked by their norm. This file is run in peers'
environments, so it needs torch, and the peer that it is told to run, and nothing of splitcast.

Rounds and centralised SGD steps on the same samples take turns, so that a disturbance hits both alike. Result, as JSON
on the last line: median seconds of a round and of a step, seconds from the start of the process to the end of the
first round, and the norm of the weights.
"""

import copy
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LR, SHAPE, CLASSES = 0.01, (1, 28, 28), 10
Weights = dict[str, Tensor]
Race = Callable[[nn.Sequential, Tensor, Tensor, int, Callable[[], None]], Weights]
"""Trains so many rounds from a model on x (N, b, ...) and y (N, b), calls when a round is done, returns the average."""


def blocks() -> list[nn.Module]:
    """The paper's CNN for 28x28 images."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
        nn.Sequential(nn.Linear(512, 128), nn.ReLU()),
        nn.Linear(128, CLASSES),
    ]


def samples(clients: int, batch: int) -> tuple[Tensor, Tensor]:
    """One batch of random images and labels for every client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, batch, *SHAPE, generator=generator)
    return x, torch.randint(CLASSES, (clients, batch), generator=generator)


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One step of plain SGD."""
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    sgd.step()
    sgd.zero_grad()


def mean(models: list[Weights]) -> Weights:
    """The average of some models."""
    return {name: torch.stack([each[name] for each in models]).mean(0) for name in models[0]}


def naive(model: nn.Sequential, x: Tensor, y: Tensor, rounds: int, done: Callable[[], None]) -> Weights:
    """A loop over clients."""
    average = copy.deepcopy(model.state_dict())
    for _ in range(rounds):
        found = []
        for images, labels in zip(x, y, strict=True):
            model.load_state_dict(average)
            step(model, images, labels)
            found.append(copy.deepcopy(model.state_dict()))
        average = mean(found)
        done()
    return average


def splitcast(model: nn.Sequential, x: Tensor, y: Tensor, rounds: int, done: Callable[[], None]) -> Weights:
    """Scheme `fl` of the simulator."""
    import numpy as np

    from splitcast.base.config import Config, with_values
    from splitcast.engine.simulator import Simulator
    from splitcast.model.split import SplitModel
    from splitcast.training.task import Classification

    clients, batch = y.shape
    config = with_values(Config(), scheme="fl", clients=clients, batch=batch, lr=LR)
    parts = np.split(np.arange(clients * batch), clients)
    split = SplitModel(list(model), input_shape=SHAPE)
    simulator = Simulator(config, split, Classification(CLASSES), x.flatten(0, 1), y.flatten(), parts)
    for t in range(1, rounds + 1):
        simulator.round(t)
        done()
    return simulator.state.averaged(simulator.weights)


def flower(model: nn.Sequential, x: Tensor, y: Tensor, rounds: int, done: Callable[[], None]) -> Weights:
    """Flower's simulation: a ClientApp in Ray actors, one core each, and its FedAvg strategy."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    clients, batch = y.shape
    client_app, server_app, found = ClientApp(), ServerApp(), {}

    def train(message: Message, context: Context) -> Message:
        images, labels = samples(clients, batch)
        which, local = int(context.node_config["partition-id"]), nn.Sequential(*blocks())
        local.load_state_dict(message.content["arrays"].to_torch_state_dict())
        step(local, images[which], labels[which])
        content = {"arrays": ArrayRecord(local.state_dict()), "metrics": MetricRecord({"num-examples": batch})}
        return Message(content=RecordDict(content), reply_to=message)

    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        start = ArrayRecord(model.state_dict())

        def round_done(server_round: int, arrays: Any) -> None:
            if server_round:
                done()

        result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds, evaluate_fn=round_done)
        found.update(result.arrays.to_torch_state_dict())

    client_app.train()(train)
    server_app.main()(main)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)
    return found


def pfl(model: nn.Sequential, x: Tensor, y: Tensor, rounds: int, done: Callable[[], None]) -> Weights:
    """pfl-research's simulated backend with its FederatedAveraging."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def loss(self, images: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
            return F.cross_entropy(self.net(images), labels)

        def metrics(self, images: Tensor, labels: Tensor, eval: bool = False) -> dict[str, Any]:
            return {}

    class Told(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            done()
            return False, Metrics()

    clients, batch = y.shape
    module = Model()
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    wrapped = PyTorchModel(module, torch.optim.SGD, central)
    users = list(range(clients))
    data = FederatedDataset(lambda n: Dataset((x[n], y[n])), get_user_sampler("minimize_reuse", users))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds + 1, train_cohort_size=clients, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=wrapped,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=batch, local_max_grad_norm=None
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=batch),
        callbacks=[Told()],
    )
    return model.state_dict()


RACES: dict[str, Race] = {"naive": naive, "splitcast": splitcast, "flower": flower, "pfl": pfl}


def main(name: str, clients: int, batch: int, rounds: int) -> dict[str, float]:
    """Race, and say how it went."""
    x, y = samples(clients, batch)
    model, central = nn.Sequential(*blocks()), nn.Sequential(*blocks())
    times: dict[str, list[float]] = {"round": [], "central": []}
    began = time.perf_counter()
    first: list[float] = []

    def done() -> None:
        nonlocal began
        first.append(time.time())
        times["round"].append(time.perf_counter() - began)
        at = time.perf_counter()
        step(central, x.flatten(0, 1), y.flatten())
        times["central"].append(time.perf_counter() - at)
        began = time.perf_counter()

    weights = RACES[name](model, x, y, rounds, done)
    norm = float(torch.stack([w.double().square().sum() for w in weights.values()]).sum().sqrt())
    medians = {key: statistics.median(values[1:]) for key, values in times.items()}  # the first warms up
    return medians | {"first": first[0], "norm": norm, "rounds": len(times["round"])}


if __name__ == "__main__":
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    told = main(sys.argv[1], *map(int, sys.argv[2:5]))
    print("\n" + json.dumps(told), flush=True)
