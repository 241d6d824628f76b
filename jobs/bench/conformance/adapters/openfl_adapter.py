"""OpenFL: its aggregation functions, weighted and adaptive, on clients trained here."""

import copy

import torch
from openfl.interface.aggregation_functions import (
    AdagradAdaptiveAggregation,
    AdamAdaptiveAggregation,
    WeightedAverage,
    YogiAdaptiveAggregation,
)
from openfl.interface.aggregation_functions.core import AdaptiveAggregation
from openfl.utilities.optimizers.numpy import NumPyYogi
from openfl.utilities.types import LocalTensor
from problem import Case, run, state, train


def follow(aggregate, case: Case):
    """Run the rounds; `aggregate` makes the aggregation function from the initial parameters."""
    server, models = case.module(), []
    chosen = aggregate({name: tensor.numpy().copy() for name, tensor in server.state_dict().items()})
    for row in case.rounds:
        trained, total = {}, sum(case.sizes[k] for k in row["cohort"])
        for k in row["cohort"]:
            trained[k] = copy.deepcopy(server)
            train(trained[k], case.batches(row, k), row["lr"])
        after = {}
        for name, tensor in server.state_dict().items():
            number = row["round"] - 1
            tags = ("aggregated",) if number else ("model",)
            history = [{"round": number, "tensor_name": name, "tags": tags, "nparray": tensor.numpy().copy()}]
            local = [
                LocalTensor(str(k), module.state_dict()[name].numpy(), case.sizes[k] / total)
                for k, module in trained.items()
            ]
            after[name] = torch.tensor(chosen.call(local, iter(history), name, number, tags))
        server.load_state_dict(after)
        models.append(state(server))
    return models


def averaging(case):
    return follow(lambda w: WeightedAverage(), case)


def adaptive(kind):
    def each(case):
        keys = {"learning_rate": case.keys["server_lr"], "epsilon": case.keys["tau"]}
        if kind is not AdagradAdaptiveAggregation:
            keys["betas"] = (case.keys["beta1"], case.keys["beta2"])
        return follow(lambda w: kind(params=w, initial_accumulator_value=0.0, **keys), case)

    return each


def yogi(case):
    """Run Yogi as `YogiAdaptiveAggregation` would make it, if its constructor did not misspell `epsilon`."""
    keys = {"learning_rate": case.keys["server_lr"], "epsilon": case.keys["tau"]}
    betas = (case.keys["beta1"], case.keys["beta2"])
    return follow(lambda w: AdaptiveAggregation(NumPyYogi(params=w, betas=betas, **keys), WeightedAverage()), case)


if __name__ == "__main__":
    run(
        "openfl",
        {
            "fedavg/partial": averaging,
            "fedadam/adam": adaptive(AdamAdaptiveAggregation),
            "fedyogi/adam": adaptive(YogiAdaptiveAggregation),
            "fedyogi/adam: NumPyYogi": yogi,
            "fedadagrad/zero": adaptive(AdagradAdaptiveAggregation),
        },
    )
