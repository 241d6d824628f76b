"""NVFlare: `PTScaffoldHelper` and the SCAFFOLD workflow's aggregation, FedProx's loss, FedOpt's server step."""

import copy

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_common.workflows.scaffold import _add_control_delta, scaffold_aggregate_fn
from nvflare.app_opt.pt.fedopt import PTFedOptModelShareableGenerator
from nvflare.app_opt.pt.fedproxloss import PTFedProxLoss
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper
from problem import NUM_CLIENTS, Case, run, state, train
from torch.nn.functional import cross_entropy

STEPS = "NUM_STEPS_CURRENT_ROUND"


def arrays(module):
    """Return a model's parameters as NumPy arrays, by name."""
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def scaffold(case: Case, momentum: float = 0.0):
    """Run the rounds; clients follow NVFlare's SCAFFOLD example step by step."""
    server, models = case.module(), []
    control = {name: 0 * array for name, array in arrays(server).items()}
    modules, helpers = [case.module() for _ in range(NUM_CLIENTS)], [PTScaffoldHelper() for _ in range(NUM_CLIENTS)]
    for module, helper in zip(modules, helpers, strict=True):
        helper.init(module)
    for row in case.rounds:
        results = []
        for k in row["cohort"]:
            module, helper = modules[k], helpers[k]
            module.load_state_dict(server.state_dict())
            helper.load_global_controls(control)
            c_global, c_local = helper.get_params()
            before = copy.deepcopy(module)
            optimizer = torch.optim.SGD(module.parameters(), lr=row["lr"], momentum=momentum)
            batches = case.batches(row, k)
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(module(x), y).backward()
                optimizer.step()
                helper.model_update(module, row["lr"], c_global, c_local)
            helper.terms_update(module, row["lr"], c_global, c_local, before)
            old = arrays(before)
            results.append(
                FLModel(
                    params={name: array - old[name] for name, array in arrays(module).items()},
                    params_type=ParamsType.DIFF,
                    meta={AlgorithmConstants.SCAFFOLD_CTRL_DIFF: helper.get_delta_controls(), STEPS: len(batches)},
                )
            )
        found = scaffold_aggregate_fn(results)
        after = {name: torch.tensor(array + found.params[name]) for name, array in arrays(server).items()}
        server.load_state_dict(after)
        for name, delta in found.meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF].items():
            control[name] = _add_control_delta(control[name], delta)
        models.append(state(server))
    return models


def with_momentum(case):
    return scaffold(case, case.local["momentum"])


def averaged(case: Case, trained, step):
    """Run the rounds: clients `trained`, their differences averaged by samples, then a server's `step`."""
    server, models = case.module(), []
    for row in case.rounds:
        helper = WeightedAggregationHelper()
        for k in row["cohort"]:
            module = copy.deepcopy(server)
            trained(module, case.batches(row, k), row["lr"])
            old = arrays(server)
            helper.add({name: a - old[name] for name, a in arrays(module).items()}, case.sizes[k], str(k), row["round"])
        step(server, helper.get_result())
        models.append(state(server))
    return models


def add(server, difference):
    server.load_state_dict({name: torch.tensor(array + difference[name]) for name, array in arrays(server).items()})


def averaging(case):
    return averaged(case, train, add)


def prox(case):
    near = PTFedProxLoss(case.keys["mu"])

    def trained(module, batches, lr):
        anchor, optimizer = copy.deepcopy(module), torch.optim.SGD(module.parameters(), lr=lr)
        for x, y in batches:
            optimizer.zero_grad()
            (cross_entropy(module(x), y) + near(module, anchor)).backward()
            optimizer.step()

    return averaged(case, trained, add)


def adam(case):
    generator = PTFedOptModelShareableGenerator(device="cpu", optimizer_args={"path": "torch.optim.Adam"})
    keys = case.keys

    def step(server, difference):
        if generator.model is None:  # as its START_RUN event
            generator.model = server
            generator.optimizer = torch.optim.Adam(
                server.parameters(), lr=keys["server_lr"], betas=(keys["beta1"], keys["beta2"]), eps=keys["tau"]
            )
        generator.server_update(difference)

    return averaged(case, train, step)


if __name__ == "__main__":
    run(
        "nvflare",
        {
            "fedavg/partial": averaging,
            "fedprox/partial": prox,
            "fedadam/adam": adam,
            "scaffold/all": scaffold,
            "scaffold/partial": scaffold,
            "scaffold/decay": scaffold,
            "scaffold/unequal": scaffold,
            "scaffold/momentum": with_momentum,
            "scaffold/after-all": with_momentum,
        },
    )
