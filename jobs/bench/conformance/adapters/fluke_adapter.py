"""fluke: its clients and servers over its channel, in the order of `CentralizedFL`."""

import torch
from fluke import FlukeENV
from fluke.algorithms.fedavgm import FedAVGMServer
from fluke.algorithms.feddyn import FedDynClient, FedDynServer
from fluke.algorithms.fednova import FedNovaClient, FedNovaServer
from fluke.algorithms.fedopt import FedOptServer
from fluke.algorithms.fedprox import FedProxClient
from fluke.algorithms.scaffold import SCAFFOLDClient, SCAFFOLDServer
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from problem import NUM_CLIENTS, Case, run, state

FlukeENV().open_cache("conformance")


def follow(server_kind, client_kind, case: Case, weighted: bool, server_keys=None, client_keys=None):
    """Run the rounds; one epoch over the round's samples in minibatches, or three over all samples."""
    whole = "unequal" not in case.name
    sizes = case.sizes if whole else [2] * NUM_CLIENTS
    loaders = [
        FastDataLoader(*case.samples(k), num_labels=3, batch_size=sizes[k], skip_singleton=False)
        for k in range(NUM_CLIENTS)
    ]
    decay = case.rounds[1]["lr"] / case.lr
    clients = [
        client_kind(
            index=k,
            train_set=loaders[k],
            test_set=None,
            optimizer_cfg=OptimizerConfigurator(
                {"name": "SGD", "lr": case.lr},
                {"name": "StepLR", "step_size": 3 if whole else 1, "gamma": decay},
            ),
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=3 if whole else 1,
            clipping=0,
            **(client_keys or {}),
        )
        for k in range(NUM_CLIENTS)
    ]
    server = server_kind(model=case.module(), test_set=None, clients=clients, weighted=weighted, **(server_keys or {}))
    for client in clients:
        client.set_channel(server.channel)
    if server_kind is FedDynServer:  # as FedDyn._round_zero
        for client in clients:
            client._send_weight()
        server._send_weights(server._receive_weights())
        for client in clients:
            client._receive_weights()
    models = []
    for row in case.rounds:
        for k in row["cohort"]:
            if not whole:
                parts = case.batches(row, k)
                loaders[k].tensors = [torch.cat(part) for part in zip(*parts, strict=True)]
        eligible = [clients[k] for k in row["cohort"]]
        server.broadcast_model(eligible)
        for client in eligible:
            client.local_update(row["round"])
        server.aggregate(eligible, server.receive_client_models(eligible, state_dict=False))
        models.append(state(server.model))
    return models


def averaging(case):
    return follow(Server, Client, case, weighted=True)


def momentum(case):
    return follow(FedAVGMServer, Client, case, True, {"momentum": case.keys["beta"]})


def prox(case):
    return follow(Server, FedProxClient, case, True, None, {"mu": case.keys["mu"]})


def scaffold(case):
    return follow(SCAFFOLDServer, SCAFFOLDClient, case, weighted=False)


def nova(case):
    return follow(FedNovaServer, FedNovaClient, case, weighted=True)


def dynamic(case):
    alpha = {"alpha": case.keys["alpha"]}
    return follow(FedDynServer, FedDynClient, case, False, alpha, alpha)


def adaptive(mode):
    def each(case):
        keys = {"mode": mode, "lr": case.keys["server_lr"], "beta1": case.keys["beta1"], "tau": case.keys["tau"]}
        return follow(FedOptServer, Client, case, True, {**keys, "beta2": case.keys.get("beta2", 0.99)})

    return each


if __name__ == "__main__":
    run(
        "fluke-fl",
        {
            "fedavg/partial": averaging,
            "fedprox/partial": prox,
            "fedavgm/partial": momentum,
            "fednova/unequal": nova,
            "scaffold/all": scaffold,
            "scaffold/partial": scaffold,
            "scaffold/decay": scaffold,
            "feddyn/all": dynamic,
            "feddyn/partial": dynamic,
            "fedadam/zero": adaptive("adam"),
            "fedyogi/zero": adaptive("yogi"),
            "fedadagrad/zero": adaptive("adagrad"),
        },
    )
