"""The trajectories of vectors.json, computed anew from the equations in plain NumPy; this file needs nothing else.

    python check_vectors.py vectors.json                         every method and case: its deviation by round
    python check_vectors.py vectors.json scaffold/partial        that one
    python check_vectors.py vectors.json --theirs mine.json      your trajectories instead of these

A deviation is the largest difference of a parameter from ``w`` in the file, over the largest parameter. The exit code
is 1 beyond 1e-12 (``--tolerance 1e-5`` for float32), and 2 for files that cannot be read. ``mine.json`` has four models
for each name that was run: ``{"scaffold/partial": [{"weight": [[…]], "bias": […]}, …]}``.

Signs: Δ_i = w − y_i, so servers subtract. Sizes: 12 parameters, the bias first, then the weight by rows.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

CLASSES = 3
TOLERANCE = 1e-12


def flat(model):
    """Return a model as one vector (12,)."""
    return np.concatenate([np.ravel(model["bias"]), np.ravel(model["weight"])]).astype(float)


def gradient(y, x, labels):
    """Return the gradient (12,) of the mean cross-entropy of softmax(weight x + bias)."""
    bias, weight = y[:CLASSES], y[CLASSES:].reshape(CLASSES, -1)
    z = x @ weight.T + bias
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    p /= len(labels)
    return np.concatenate([p.sum(axis=0), (p.T @ x).ravel()])


# ---------------------------------------------------------------- clients


class Sgd:
    """v ← ρ v + g;  y ← y − η v."""

    def __init__(self, local, guess):
        self.rho, self.guess, self.v = local.get("momentum", 0.0), guess, 0.0

    def move(self, y, g, lr):
        self.v = self.rho * self.v + g
        return y - lr * self.v

    def finish(self, y, lr):
        """Go on along the momentum without gradients, to the limit of infinitely many steps."""
        return y - lr * self.rho / (1 - self.rho) * self.v if self.guess == "limit" else y


class Adam:
    """Adam or Yogi of one round: both moments begin at 0, and both are freed of their bias."""

    def __init__(self, local):
        self.yogi = local["optimizer"] == "yogi"
        self.beta1, self.beta2 = local.get("beta1", 0.9), local.get("beta2", 0.999)
        self.eps, self.m, self.v, self.k = local.get("eps", 1e-8), 0.0, 0.0, 0

    def move(self, y, g, lr):
        self.k += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        if self.yogi:
            self.v = self.v - (1 - self.beta2) * g**2 * np.sign(self.v - g**2)
        else:
            self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m, v = self.m / (1 - self.beta1**self.k), self.v / (1 - self.beta2**self.k)
        return y - lr * m / (np.sqrt(v) + self.eps)

    def finish(self, y, lr):
        return y


def train(start, client, batches, lr, local, guess, shift=0.0, mu=0.0, anchor=0.0, after=0.0):
    """Return the last iterate: steps along clip(∇f + shift + μ (y − anchor)) + λ y, and −η ``after`` beside each.

    ``clip: linear`` adds μ y after the clip; what the clip then bounds is ∇f + shift − μ anchor.
    """
    x, labels = np.array(client["x"]), np.array(client["y"])
    y, bound, linear = start.copy(), local.get("clip_norm"), local.get("clip") == "linear"
    optimizer = Adam(local) if local.get("optimizer", "sgd") != "sgd" else Sgd(local, guess)
    for batch in batches:
        g = gradient(y, x[batch], labels[batch]) + shift - mu * anchor + (0.0 if linear else mu * y)
        if bound is not None:
            g = g * min(1.0, bound / (np.linalg.norm(g) + 1e-6))
        g = g + (mu * y if linear else 0.0) + local.get("weight_decay", 0.0) * y
        y = optimizer.move(y, g, lr) - lr * after
    return optimizer.finish(y, lr)


def effective_steps(steps, lr, local, guess, mu=0.0):
    """Return ‖a_i‖₁: how far a client moves, over −η, if all its gradients are 1."""
    rho, x, v = local.get("momentum", 0.0), 0.0, 0.0
    for _ in range(steps):
        v = rho * v + 1 - lr * mu * x
        x += v
    return x + (rho / (1 - rho) * v if guess == "limit" else 0.0)


# ---------------------------------------------------------------- methods


class Method:
    """A method's rounds.

    Attributes:
        keys: its parameters. clients: samples of all. p_all: q_i of all clients, (4,).
        w: the server's model, (12,). states: of clients, by number.
    """

    def __init__(self, keys, weights, clients, w, local, guess):
        sizes = np.array([len(client["y"]) for client in clients], float)
        self.name, self.keys, self.clients, self.w = keys["name"], keys, clients, w.copy()
        self.p_all = sizes / sizes.sum() if weights == "samples" else np.full(len(sizes), 1 / len(sizes))
        self.relative = sizes / sizes.mean()
        self.local, self.guess, self.states, self.server = local, guess, {}, {}
        self.initial, self.t = w.copy(), 0

    def round(self, row):
        """Do a round, and return the model after it."""
        self.t += 1
        self.lr = self.local.get("lr", row["lr"])
        cohort = row["cohort"]
        self.q = self.p_all[cohort].sum()
        self.p = self.p_all[cohort] / self.q
        self.batches = [row["batches"][str(i)] for i in cohort]
        self.steps = np.array([len(each) for each in self.batches])
        getattr(self, "_" + RULES[self.name])(cohort)
        return self.w

    def mean(self, vectors):
        """Σ_{i∈S} p_i v_i."""
        return sum(p * v for p, v in zip(self.p, vectors, strict=True))

    def deltas(self, cohort, shift=None, mu=0.0, after=None):
        """Return Δ_i = w − y_i of the cohort; ``shift[k]`` is added to the gradients of its k-th client, ``after[k]``
        to its steps.
        """
        none, mus = np.zeros(len(cohort)), np.broadcast_to(mu, len(cohort))
        shifts, afters = (none if each is None else each for each in (shift, after))
        return [self.w - self.solve(i, k, self.w, shifts[k], mus[k], self.w, afters[k]) for k, i in enumerate(cohort)]

    def solve(self, i, k, start, shift, mu, anchor, after=0.0):
        tilt = shift, mu, anchor, after
        return train(start, self.clients[i], self.batches[k], self.lr, self.local, self.guess, *tilt)

    def a(self, mu=0.0):
        """‖a_i‖₁ of the cohort, (|S|,)."""
        return np.array([effective_steps(k, self.lr, self.local, self.guess, mu) for k in self.steps])

    def _average(self, cohort):  # FedAvg, FedProx, Ditto's shared model, distributed SGD
        mu = self.keys["mu"] if self.name == "fedprox" else 0.0
        self.w = self.w - self.keys["server_lr"] * self.mean(self.deltas(cohort, mu=mu))

    def _momentum(self, cohort):  # Hsu et al. 2019
        self.server["v"] = self.keys["beta"] * self.server.get("v", 0.0) + self.mean(self.deltas(cohort))
        self.w = self.w - self.keys["server_lr"] * self.server["v"]

    def _nova(self, cohort):  # Wang et al. 2020, eqs. (3)-(6)
        mu, rule = self.keys["mu"], self.keys["tau_eff"]
        a = self.a(mu)
        by_steps = rule == "steps" or (rule == "auto" and mu > 0)
        tau_eff = (self.p * (self.steps if by_steps else a)).sum()
        d = self.mean([delta / a_i for delta, a_i in zip(self.deltas(cohort, mu=mu), a, strict=True)])
        self.server["v"] = self.keys["beta"] * self.server.get("v", 0.0) + tau_eff * d
        self.w = self.w - self.keys["server_lr"] * self.server["v"]

    def _adaptive(self, cohort):  # Reddi et al. 2021, Algorithm 2
        keys, mean = self.keys, self.mean(self.deltas(cohort))
        beta1, beta2, tau = keys["beta1"], keys.get("beta2"), keys["tau"]
        v = self.server.get("v", np.full_like(self.w, tau**2 if keys["v0"] == "tau2" else 0.0))
        m = beta1 * self.server.get("m", 0.0) + (1 - beta1) * mean
        squared = (mean if keys["second"] == "delta" else m) ** 2
        if self.name == "fedadagrad":
            v = v + squared
        elif self.name == "fedadam":
            v = beta2 * v + (1 - beta2) * squared
        else:
            v = v - (1 - beta2) * squared * np.sign(v - squared)
        self.server.update(m=m, v=v)
        if keys["debias"] != "none":
            t = self.t if keys["debias"] == "adam" else 1
            m, v = m / (1 - beta1**t), v / (1 - beta2**t)
        self.w = self.w - keys["server_lr"] * m / (np.sqrt(v + tau) if keys["root"] == "padded" else np.sqrt(v) + tau)

    def _eps(self, cohort):
        scale = len(cohort) if self.keys["eps_scale"] == "cohort" else 1
        return self.keys["eps"] * self.keys["eps_decay"] ** self.t * scale

    def _extrapolate(self, deltas, cohort):  # Jhunjhunwala et al. 2023, eq. (9)
        mean, norms = self.mean(deltas), self.mean([delta @ delta for delta in deltas])
        two = 1 if self.keys["exact_projection"] else 2
        self.w = self.w - max(1.0, norms / (two * (mean @ mean + self._eps(cohort)))) * mean

    def _exp(self, cohort):
        self._extrapolate(self.deltas(cohort), cohort)

    def _exp_momentum(self, cohort):  # eq. (115)
        deltas, beta = self.deltas(cohort), self.keys["beta"]
        v = self.mean(deltas) + beta * self.server.get("v", 0.0)
        norms = self.mean([delta @ delta for delta in deltas]) + beta / 2 * self.server.get("M", 0.0)
        self.server.update(v=v, M=norms)
        self.w = self.w - norms / (2 * (v @ v + self._eps(cohort))) * v

    def _scaffold(self, cohort):  # Karimireddy et al. 2020, Algorithm 1, option II
        c, zero = self.server.get("c", np.zeros_like(self.w)), np.zeros_like(self.w)
        after, c_scale = self.keys.get("correction") == "after-momentum", self.keys.get("c_scale")
        size, ones = self.relative[cohort], np.ones(len(cohort))
        own, a = [self.states.get(i, zero) for i in cohort], self.steps if after else self.a()
        tilts = [c / s_i - c_i for s_i, c_i in zip(size if c_scale == "samples" else ones, own, strict=True)]
        deltas = self.deltas(cohort, **{"after" if after else "shift": tilts})
        psi = [c - delta / (a_i * self.lr) for delta, a_i in zip(deltas, a, strict=True)]
        s = {"samples": size, "uniform": 1 / size}.get(c_scale, ones)
        for i, c_i, psi_i in zip(cohort, own, psi, strict=True):
            self.states[i] = c_i - psi_i
        self.server["c"] = c - self.q * self.mean([s_i * psi_i for s_i, psi_i in zip(s, psi, strict=True)])
        if self.name == "scaffold-exp":
            self._extrapolate(deltas, cohort)
        else:
            self.w = self.w - self.keys["server_lr"] * self.mean(deltas)

    def _dynamic(self, cohort):  # Acar et al. 2021, Algorithm 1
        alpha, zero = self.keys["alpha"], np.zeros_like(self.w)
        scaled = self.keys["alpha_scale"] == "samples"
        alphas = alpha / self.relative[cohort] if scaled else np.full(len(cohort), alpha)
        own = [self.states.get(i, zero) for i in cohort]
        deltas = self.deltas(cohort, [-h_i for h_i in own], alphas)
        for i, h_i, alpha_i, delta in zip(cohort, own, alphas, deltas, strict=True):
            self.states[i] = h_i + alpha_i * delta
        mean = self.mean(deltas)
        self.server["h"] = self.server.get("h", 0.0) + alpha * self.q * mean
        self.w = self.w - mean - self.server["h"] / alpha

    def _split(self, cohort):  # Pathak and Wainwright 2020, eqs. (9a)-(9c)
        moved, after = [], []
        for k, i in enumerate(cohort):
            z = self.states.get(i, self.initial)
            y = self.solve(i, k, 2 * self.w - z, 0.0, 1 / self.keys["s"], 2 * self.w - z)
            self.states[i] = z + 2 * (y - self.w)
            moved.append(self.states[i] - z)
            after.append(self.states[i])
        self.w = self.mean(after) if self.keys["variant"] == "act" else self.w + self.q * self.mean(moved)


RULES = {
    **dict.fromkeys(("fedavg", "fedprox", "ditto", "dsgd"), "average"),
    **dict.fromkeys(("fedadagrad", "fedadam", "fedyogi"), "adaptive"),
    **dict.fromkeys(("scaffold", "scaffold-exp"), "scaffold"),
    "fedavgm": "momentum",
    "fednova": "nova",
    "fedexp": "exp",
    "fedexp-m": "exp_momentum",
    "feddyn": "dynamic",
    "fedsplit": "split",
}


# ---------------------------------------------------------------- the file


def entries(content):
    """Return by name: what to compute, its initial model, its rounds and the models after them, (4, 12)."""
    found = {}
    for name, own in content["methods"].items():
        found[name] = own, own["initial"], own["rounds"], [row["w"] for row in own["rounds"]]
    for name, own in content.get("cases", {}).items():
        protocol = content["protocols"][own["protocol"]]
        found[name] = own, protocol["initial"], protocol["rounds"], own["w"]
    return {
        name: (own, flat(first), rounds, np.array([flat(w) for w in models]))
        for name, (own, first, rounds, models) in found.items()
    }


def trajectory(own, initial, rounds, clients):
    """Return the models after each round, (4, 12), by the equations above."""
    method = Method(own["algorithm"], own["weights"], clients, initial, own.get("local", {}), own.get("guess", "none"))
    return np.array([method.round(row) for row in rounds])


def deviations(found, wanted):
    """Return the largest difference of each round over the largest parameter of all that is wanted in it."""
    return np.abs(found - wanted).max(axis=1) / np.abs(wanted).max(axis=1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="vectors.json")
    parser.add_argument("names", nargs="*", help="methods or cases; all without any")
    parser.add_argument("--theirs", help="a JSON file of your trajectories")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    chosen = parser.parse_intermixed_args(arguments)
    file, theirs = chosen.file, None
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        known = entries(content)
        if chosen.theirs:
            file = chosen.theirs
            loaded = json.loads(Path(file).read_text(encoding="utf-8"))
            theirs = {name: np.array([flat(w) for w in models]) for name, models in loaded.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"check_vectors: {file}: cannot be read: {error!r}", file=sys.stderr)
        return 2
    names = chosen.names or list(known if theirs is None else theirs)
    missing = [name for name in names if name not in known or (theirs is not None and name not in theirs)]
    if missing:
        print(f"check_vectors: no trajectory of {missing[0]!r}", file=sys.stderr)
        return 2
    methods = [known[name][0]["algorithm"]["name"] for name in names]
    without = [method for method in methods if theirs is None and method not in RULES]
    if without:
        print(f"check_vectors: no rule for {without[0]!r}: write it in Method, and its name in RULES", file=sys.stderr)
        return 2
    agree = True
    for name in names:
        own, initial, rounds, wanted = known[name]
        found = trajectory(own, initial, rounds, content["problem"]["clients"]) if theirs is None else theirs[name]
        if found.shape != wanted.shape:
            print(f"check_vectors: {name} has {found.shape}, not {wanted.shape}, numbers", file=sys.stderr)
            return 2
        by_round = deviations(found, wanted)
        holds = bool((by_round <= chosen.tolerance).all())
        agree &= holds
        print(f"{name:22s} {'agrees ' if holds else 'differs'} " + " ".join(f"{each:8.1e}" for each in by_round))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
