"""FedLab: its server handlers and serial client trainers, driven as its standalone pipeline drives them."""

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.algorithm.feddyn import FedDynSerialClientTrainer, FedDynServerHandler
from fedlab.contrib.algorithm.fednova import FedNovaSerialClientTrainer, FedNovaServerHandler
from fedlab.contrib.algorithm.fedprox import FedProxSerialClientTrainer
from fedlab.contrib.algorithm.scaffold import ScaffoldSerialClientTrainer, ScaffoldServerHandler
from problem import NUM_CLIENTS, Case, run, state


class Minibatches:
    """A data set whose loaders are the minibatches of the current round."""

    def __init__(self, case: Case):
        self.case, self.row = case, case.rounds[0]

    def get_dataloader(self, client, batch_size=None):
        """Return the minibatches of a client."""
        return self.case.batches(self.row, client)


def follow(server_kind, client_kind, case: Case, server_keys=None, client_keys=()):
    """Run the rounds; `server_keys` and `client_keys` are arguments of both `setup_optim`."""
    server = server_kind(case.module(), len(case.rounds), len(case.rounds[0]["cohort"]) / NUM_CLIENTS)
    trainer = client_kind(case.module(), NUM_CLIENTS)
    server.num_clients = NUM_CLIENTS
    if server_keys is not None:
        server.setup_optim(*server_keys)
    data = Minibatches(case)
    trainer.setup_dataset(data)
    trainer.setup_optim(1, 1, case.lr, *client_keys)
    models = []
    for row in case.rounds:
        data.row, trainer.lr = row, row["lr"]
        for group in trainer.optimizer.param_groups:
            group["lr"] = row["lr"]
        trainer.local_process(server.downlink_package, row["cohort"])
        for package in trainer.uplink_package:
            server.load(package)
        models.append(state(server.model))
    return models


def averaging(case):
    return follow(SyncServerHandler, SGDSerialClientTrainer, case)


def prox(case):
    return follow(SyncServerHandler, FedProxSerialClientTrainer, case, None, [case.keys["mu"]])


def scaffold(case):
    return follow(ScaffoldServerHandler, ScaffoldSerialClientTrainer, case, [1.0])


def dynamic(case):
    alpha = case.keys["alpha"]
    return follow(FedDynServerHandler, FedDynSerialClientTrainer, case, [alpha], [alpha])


def nova(option):
    return lambda case: follow(FedNovaServerHandler, FedNovaSerialClientTrainer, case, [option])


if __name__ == "__main__":
    run(
        "fedlab",
        {
            "fedavg/uniform": averaging,
            "fedprox/uniform": prox,
            "fednova/uniform: weighted_scale": nova("weighted_scale"),
            "fednova/uniform: weighted_com": nova("weighted_com"),
            "scaffold/all": scaffold,
            "scaffold/partial": scaffold,
            "scaffold/decay": scaffold,
            "scaffold/unequal": scaffold,
            "feddyn/all": dynamic,
            "feddyn/partial": dynamic,
        },
    )
