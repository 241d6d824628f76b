"""pfl (Apple): federated averaging, FedProx and SCAFFOLD, run by `SimulatedBackend`."""

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from problem import NUM_CLIENTS, Case, run, state
from torch.nn.functional import cross_entropy

NEVER = 10**9


class Module(torch.nn.Module):
    """The model with the loss that pfl asks for."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def loss(self, x, y):
        """Return the mean cross-entropy."""
        return cross_entropy(torch.nn.functional.linear(x, self.weight, self.bias), y)

    def metrics(self, x, y):
        """Return nothing: only the trajectory counts."""
        return {}


class Recorder(TrainingProcessCallback):
    """The model after each round."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.models = module, []

    def after_central_iteration(self, *arguments, **named):
        """Keep the model."""
        self.models.append(state(self.module))
        return False, super().after_central_iteration(*arguments, **named)[1]


def follow(algorithm, params, case: Case, weighted: bool, **central):
    """Run an algorithm over the case's cohorts."""
    module = Module(case.module())
    kind = central.pop("optimizer", torch.optim.SGD)
    model = PyTorchModel(
        module,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        kind(module.parameters(), **{"lr": 1.0, **central}),
    )
    drawn = iter([client for row in case.rounds for client in row["cohort"]])
    clients = [Dataset(list(case.samples(client)), user_id=str(client)) for client in range(NUM_CLIENTS)]
    data = FederatedDataset(clients.__getitem__, lambda: next(drawn))
    recorder = Recorder(module)
    numbers = {
        "central_num_iterations": len(case.rounds),
        "evaluation_frequency": NEVER,
        "train_cohort_size": len(case.rounds[0]["cohort"]),
        "val_cohort_size": 0,
    }
    algorithm.run(
        params(**numbers),
        SimulatedBackend(data, data, [WeightByDatapoints()] if weighted else []),
        model,
        NNTrainHyperParams(local_batch_size=None, local_num_epochs=3, local_learning_rate=case.lr),
        NNEvalHyperParams(local_batch_size=None),
        [recorder],
    )
    return recorder.models


def averaging(case):
    return follow(FederatedAveraging(), NNAlgorithmParams, case, weighted=True)


def adam(case):
    keys = case.keys
    named = {"lr": keys["server_lr"], "betas": (keys["beta1"], keys["beta2"]), "eps": keys["tau"]}
    return follow(FederatedAveraging(), NNAlgorithmParams, case, weighted=True, optimizer=torch.optim.Adam, **named)


def prox(case):
    return follow(FedProx(), lambda **numbers: FedProxParams(mu=case.keys["mu"], **numbers), case, weighted=True)


def scaffold(case):
    def params(**numbers):
        return SCAFFOLDParams(
            population=NUM_CLIENTS,
            use_gradient_as_control_variate=False,
            user_state_storage=InMemoryUserStateStorage(),
            **numbers,
        )

    return follow(SCAFFOLD(), params, case, weighted=False)


if __name__ == "__main__":
    run(
        "pfl",
        {
            "fedavg/partial": averaging,
            "fedprox/partial": prox,
            "fedadam/adam": adam,
            "scaffold/all": scaffold,
            "scaffold/partial": scaffold,
        },
    )
