"""FedJAX: federated averaging, FedProx, and the optimizers that its server takes, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from fedjax import optimizers
from fedjax.algorithms import fed_avg, fed_prox
from problem import Case, run

jax.tree_map = jax.tree_util.tree_map  # which fedjax calls by the name that later versions of JAX lack


def per_example(params, batch, rng):
    """Return the cross-entropy of each sample."""
    z = batch["x"] @ params["weight"].T + params["bias"]
    return jax.nn.logsumexp(z, axis=1) - jnp.take_along_axis(z, batch["y"][:, None], axis=1)[:, 0]


def gradient(params, batch, rng):
    """Return the gradient of the mean."""
    return jax.grad(lambda each: per_example(each, batch, rng).mean())(params)


class Minibatches:
    """A client's data: what FedJAX's algorithms ask of it."""

    def __init__(self, size, batches):
        self.size, self.batches = size, batches

    def __len__(self):
        return self.size

    def shuffle_repeat_batch(self, hparams):
        """Return the minibatches of the round."""
        return [{"x": x.numpy(), "y": y.numpy()} for x, y in self.batches]


def follow(algorithm, case: Case):
    """Run the rounds."""
    initial = {name: jnp.asarray(tensor.numpy()) for name, tensor in case.module().state_dict().items()}
    current, models = algorithm.init(initial), []
    for row in case.rounds:
        clients = [
            (str(k), Minibatches(case.sizes[k], case.batches(row, k)), jax.random.PRNGKey(0)) for k in row["cohort"]
        ]
        current, _ = algorithm.apply(current, clients)
        models.append({name: np.asarray(array).tolist() for name, array in current.params.items()})
    return models


def averaging(server):
    def each(case):
        return follow(fed_avg.federated_averaging(gradient, optimizers.sgd(case.lr), server(case.keys), None), case)

    return each


def prox(case):
    mu = case.keys["mu"]
    return follow(fed_prox.fed_prox(per_example, optimizers.sgd(case.lr), optimizers.sgd(1.0), None, mu), case)


def adam(keys):
    return optimizers.adam(keys["server_lr"], keys["beta1"], keys["beta2"], keys["tau"])


def yogi(keys):
    return optimizers.yogi(keys["server_lr"], keys["beta1"], keys["beta2"], keys["tau"])


def adagrad(keys):
    return optimizers.adagrad(keys["server_lr"], 0.0, keys["tau"])


if __name__ == "__main__":
    run(
        "fedjax",
        {
            "fedavg/partial": averaging(lambda keys: optimizers.sgd(1.0)),
            "fedavgm/partial": averaging(lambda keys: optimizers.sgd(1.0, keys["beta"])),
            "fedprox/partial": prox,
            "fedadam/adam": averaging(adam),
            "fedyogi/adam": averaging(yogi),
            "fedadagrad/authors": averaging(adagrad),
        },
    )
