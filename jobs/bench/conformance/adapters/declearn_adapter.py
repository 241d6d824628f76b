"""declearn (Inria): its optimizers, whose modules are SCAFFOLD, FedProx, momentum, Adam, Yogi and Adagrad."""

import torch
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from declearn.optimizer.modules import (
    AdaGradModule,
    AdamModule,
    MomentumModule,
    ScaffoldClientModule,
    ScaffoldServerModule,
    YogiModule,
)
from problem import NUM_CLIENTS, Case, run, state
from torch.nn.functional import cross_entropy


class Model:
    """A model with what declearn's optimizers ask for."""

    def __init__(self, module):
        self.module = module

    def get_weights(self, trainable=False):
        """Return the parameters."""
        return NumpyVector({name: tensor.numpy().copy() for name, tensor in self.module.state_dict().items()})

    def set_weights(self, weights):
        """Take parameters."""
        self.module.load_state_dict({name: torch.tensor(array) for name, array in weights.coefs.items()})

    def apply_updates(self, updates):
        """Add updates to the parameters."""
        self.set_weights(self.get_weights() + updates)

    def gradients(self, x, y):
        """Return the gradient of the mean cross-entropy."""
        self.module.zero_grad()
        cross_entropy(self.module(x), y).backward()
        return NumpyVector({name: tensor.grad.numpy().copy() for name, tensor in self.module.named_parameters()})


def follow(case: Case, server: Optimizer, client, uniform: bool = False):
    """Run the rounds; `client` makes a client's optimizer, kept for all rounds."""
    main, models = Model(case.module()), []
    optimizers = [client() for _ in range(NUM_CLIENTS)]
    for row in case.rounds:
        start, aux = main.get_weights(), server.collect_aux_var()
        total, weight, sent = 0.0, 0.0, None
        for k in row["cohort"]:
            local, optimizer = Model(case.module()), optimizers[k]
            local.set_weights(start)
            optimizer.process_aux_var(aux)
            optimizer.start_round()
            for x, y in case.batches(row, k):
                optimizer.apply_gradients(local, local.gradients(x, y))
            share = 1.0 if uniform else float(case.sizes[k])
            total, weight = (start - local.get_weights()) * share + total, weight + share
            for name, one in optimizer.collect_aux_var().items():
                sent = {name: one if sent is None else sent[name] + one}
        if sent is not None:
            server.process_aux_var(sent)
        server.apply_gradients(main, total / weight)
        models.append(state(main.module))
    return models


def plain(case):
    return lambda: Optimizer(lrate=case.lr)


def averaging(case):
    return follow(case, Optimizer(lrate=1.0), plain(case))


def momentum(case):
    return follow(case, Optimizer(lrate=1.0, modules=[MomentumModule(case.keys["beta"])]), plain(case))


def prox(case):
    regularizer = ("fedprox", {"alpha": case.keys["mu"]})
    return follow(case, Optimizer(lrate=1.0), lambda: Optimizer(lrate=case.lr, regularizers=[regularizer]))


def scaffold(case):
    server = Optimizer(lrate=1.0, modules=[ScaffoldServerModule()])
    return follow(case, server, lambda: Optimizer(lrate=case.lr, modules=[ScaffoldClientModule()]), uniform=True)


def adaptive(make):
    def each(case):
        return follow(case, Optimizer(lrate=case.keys["server_lr"], modules=[make(case.keys)]), plain(case))

    return each


if __name__ == "__main__":
    run(
        "declearn",
        {
            "fedavg/partial": averaging,
            "fedprox/partial": prox,
            "fedavgm/partial": momentum,
            "scaffold/all": scaffold,
            "scaffold/partial": scaffold,
            "scaffold/unequal": scaffold,
            "fedadam/adam": adaptive(lambda keys: AdamModule(keys["beta1"], keys["beta2"], eps=keys["tau"])),
            "fedyogi/adam": adaptive(lambda keys: YogiModule(keys["beta1"], keys["beta2"], eps=keys["tau"])),
            "fedadagrad/zero": adaptive(lambda keys: AdaGradModule(keys["tau"])),
        },
    )
