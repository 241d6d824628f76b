"""Flower's strategies: their `aggregate_fit` on clients trained here, since training is the user's in Flower."""

import logging

import numpy as np
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from problem import Case, run, train

logging.disable(logging.WARNING)


def follow(strategy, case: Case):
    """Run the rounds; `strategy` makes one from its initial parameters."""
    module = case.module()
    names = list(module.state_dict())
    current = [tensor.numpy().copy() for tensor in module.state_dict().values()]
    chosen, models = strategy(ndarrays_to_parameters(current)), []
    for row in case.rounds:
        results = []
        for client in row["cohort"]:
            module.load_state_dict({name: torch.tensor(array) for name, array in zip(names, current, strict=True)})
            train(module, case.batches(row, client), row["lr"])
            trained = ndarrays_to_parameters([tensor.numpy() for tensor in module.state_dict().values()])
            results.append((None, FitRes(Status(Code.OK, ""), trained, case.sizes[client], {})))
        aggregated, _ = chosen.aggregate_fit(row["round"], results, [])
        current = parameters_to_ndarrays(aggregated)
        models.append({name: np.asarray(array).tolist() for name, array in zip(names, current, strict=True)})
    return models


def averaging(case):
    return follow(lambda w: FedAvg(initial_parameters=w, inplace=False), case)


def in_place(case):
    return follow(lambda w: FedAvg(initial_parameters=w), case)


def momentum(case):
    return follow(lambda w: FedAvgM(initial_parameters=w, server_momentum=case.keys["beta"]), case)


def adaptive(kind):
    def each(case):
        named = {"eta": case.keys["server_lr"], "tau": case.keys["tau"]}
        if kind is not FedAdagrad:
            named |= {"beta_1": case.keys["beta1"], "beta_2": case.keys["beta2"]}
        return follow(lambda w: kind(initial_parameters=w, **named), case)

    return each


if __name__ == "__main__":
    run(
        "flwr",
        {
            "fedavg/partial": in_place,
            "fedavg/partial: inplace=False": averaging,
            "fedavgm/partial": momentum,
            "fedadam/adam": adaptive(FedAdam),
            "fedyogi/zero": adaptive(FedYogi),
            "fedadagrad/zero": adaptive(FedAdagrad),
        },
    )
