"""Deviating rules, written anew in NumPy from reading the packages: each row's cause, as a computation.

Where a package was run, its trajectory and its rule's here must agree: then the cause is all of the deviation. Rules of
packages that cannot be run stand alone, and the table says "transcribed". Equations are in the words of
`check_vectors`: Δ_i = w − y_i, and c, c_i, h as there.
"""

from __future__ import annotations

import numpy as np
from check_vectors import Method, gradient


class Scaffold(Method):
    """SCAFFOLD in parts: what a client keeps and sends, and what the server does with it."""

    def _scaffold(self, cohort):
        c = self.server.setdefault("c", self.first_c())
        own = [self.states.get(i, self.first_c()) for i in cohort]
        deltas = [self.client(k, i, c, c_i) for k, (i, c_i) in enumerate(zip(cohort, own, strict=True))]
        kept = [self.next_c(c, c_i, delta, k) for k, (c_i, delta) in enumerate(zip(own, deltas, strict=True))]
        for i, c_i in zip(cohort, kept, strict=True):
            self.keep(i, c_i)
        changes = [self.change(new, old, c) for new, old in zip(kept, own, strict=True)]
        self.server["c"] = c + self.c_step(changes)
        self.w = self.w - self.w_step(deltas)

    def first_c(self):
        return np.zeros_like(self.w)

    def client(self, k, i, c, c_i):
        return self.w - self.solve(i, k, self.w, c - c_i, 0.0, self.w)

    def next_c(self, c, c_i, delta, k):
        return c_i - c + delta / (self.steps[k] * self.lr)

    def keep(self, i, c_i):
        self.states[i] = c_i

    def change(self, new, old, c):
        return new - old

    def c_step(self, changes):
        return self.q * self.mean(changes)

    def w_step(self, deltas):
        return self.mean(deltas)


class ReversedSign(Scaffold):
    """c_i ← c_i − c + (y − w)/(K η): the sign of the last term."""

    def next_c(self, c, c_i, delta, k):
        return c_i - c - delta / (self.steps[k] * self.lr)


class AfterMomentum(Scaffold):
    """y ← y − η v, then y ← y − η (c − c_i): the correction beside the momentum step."""

    def client(self, k, i, c, c_i):
        x, labels = np.array(self.clients[i]["x"]), np.array(self.clients[i]["y"])
        rho, v, y = self.local.get("momentum", 0.0), 0.0, self.w.copy()
        for batch in self.batches[k]:
            v = rho * v + self.clipped(gradient(y, x[batch], labels[batch]))
            y = y - self.lr * v - self.lr * (c - c_i)
        return self.w - y

    def clipped(self, g):
        return g


class WholeCohort(AfterMomentum):
    """c ← c + mean of the changes, without |S|/N; both means weighted by local steps (NVFlare)."""

    def by_steps(self, vectors):
        shares = self.steps / self.steps.sum()
        return sum(share * vector for share, vector in zip(shares, vectors, strict=True))

    def c_step(self, changes):
        return self.by_steps(changes)

    def w_step(self, deltas):
        return self.by_steps(deltas)


class DecayedBeforeControl(Scaffold):
    """c_i divides by the step size after the scheduler's step, η'; schedules are the clients' own (fluke)."""

    def _scaffold(self, cohort):
        self.taken = getattr(self, "taken", {})
        self.cohort = cohort
        super()._scaffold(cohort)
        for i in cohort:
            self.taken[i] = self.taken.get(i, 0) + 1

    def rate(self, i):
        return 0.25 * 0.5 ** self.taken.get(i, 0)

    def client(self, k, i, c, c_i):
        self.lr = self.rate(i)
        return super().client(k, i, c, c_i)

    def next_c(self, c, c_i, delta, k):
        return c_i - c + delta / (self.steps[k] * self.rate(self.cohort[k]) * 0.5)


class KnownClients(Scaffold):
    """c is the mean of c_i over the clients that have taken part so far, not over all N (declearn)."""

    def c_step(self, changes):
        known = np.sum([self.states[i] for i in self.states], axis=0) / len(self.states)
        return known - self.server["c"]


class LastClient(Scaffold):
    """The model takes the last client's change alone, c a 1/N of its; c_i is not kept (FedML)."""

    def keep(self, i, c_i):
        """Nothing: the new c_i is put into a copy of the state."""

    def c_step(self, changes):
        return changes[-1] / len(self.clients)

    def w_step(self, deltas):
        return deltas[-1]


class Fedbench(AfterMomentum):
    """Gradients clipped at 1; the reversed sign, and (y − w)/(K η) sent in place of the change of c_i; none kept."""

    def clipped(self, g):
        return g * min(1.0, 1.0 / (np.linalg.norm(g) + 1e-6))

    def next_c(self, c, c_i, delta, k):
        return -delta / (self.steps[k] * self.lr)

    def keep(self, i, c_i):
        """Nothing: clients are made anew in each round, and what they saved is not read."""

    def change(self, new, old, c):
        return new


class FedlabDynamic(Method):
    """Clients' terms have no gradient (parameters are detached); h ← h − α/N (Σ y_i − w), w in it once."""

    def _dynamic(self, cohort):
        alpha, number = self.keys["alpha"], len(self.clients)
        models = [self.w - delta for delta in self.deltas(cohort)]
        self.server["h"] = self.server.get("h", 0.0) - alpha / number * (sum(models) - self.w)
        self.w = sum(models) / len(models) - self.server["h"] / alpha


class FedlabNova(Method):
    """Δ̄ times N/|S| (``weighted_scale``, with p = 1/|S|, which sums to 1 already)."""

    def _nova(self, cohort):
        before = self.w
        super()._nova(cohort)
        self.w = before + len(self.clients) / len(cohort) * (self.w - before)


class FlukeNova(Method):
    """w ← Σ p_i τ_eff/a_i y_i: models in the place of changes, with weights that do not sum to 1."""

    def _nova(self, cohort):
        a = self.a()
        tau_eff = (self.p * a).sum()
        self.w = self.mean([tau_eff / a_i * (self.w - d) for a_i, d in zip(a, self.deltas(cohort), strict=True)])


class FlukeDynamic(Method):
    """λ_i ← λ_i + α Δ_i where the gradient gets α λ_i, so that λ_i − Δ_i is meant; w is the mean of y_i, before λ."""

    def _dynamic(self, cohort):
        alpha, zero = self.keys["alpha"], np.zeros_like(self.w)
        alphas = alpha / self.relative[cohort]
        cloud = self.server.get("cloud", self.w)
        own = [self.states.get(i, zero) for i in cohort]
        starts = [cloud if i in self.states else self.w for i in cohort]
        deltas = []
        for k, i in enumerate(cohort):
            start = starts[k]
            deltas.append(start - self.solve(i, k, start, alphas[k] * own[k], alphas[k], start))
        for i, each, alpha_i, delta in zip(cohort, own, alphas, deltas, strict=True):
            self.states[i] = each + alpha_i * delta
        self.w = sum(start - delta for start, delta in zip(starts, deltas, strict=True)) / len(cohort)
        self.server["cloud"] = self.w + sum(self.states[i] for i in cohort) / len(cohort)


class FlukeMomentum(Method):
    """The first round makes the momentum, 0, and does not use Δ̄."""

    def _momentum(self, cohort):
        mean = self.mean(self.deltas(cohort))
        self.server["v"] = self.keys["beta"] * self.server["v"] + mean if "v" in self.server else np.zeros_like(mean)
        self.w = self.w - self.server["v"]


class FlukeAdaptive(Method):
    """η_g twice: once in the average (Δ̄ times η_g), once in the step."""

    def deltas(self, cohort, shift=None, mu=0.0):
        return [self.keys["server_lr"] * delta for delta in super().deltas(cohort, shift, mu)]


class FlowerAdam(Method):
    """The bias correction of round t + 1 in round t, and τ beside the uncorrected √v."""

    def _adaptive(self, cohort):
        keys, mean = self.keys, self.mean(self.deltas(cohort))
        m = keys["beta1"] * self.server.get("m", 0.0) + (1 - keys["beta1"]) * mean
        v = keys["beta2"] * self.server.get("v", 0.0) + (1 - keys["beta2"]) * mean**2
        self.server.update(m=m, v=v)
        lr = keys["server_lr"] * np.sqrt(1 - keys["beta2"] ** (self.t + 1)) / (1 - keys["beta1"] ** (self.t + 1))
        self.w = self.w - lr * m / (np.sqrt(v) + keys["tau"])


class BiasedYogi(Method):
    """v ← β₂ v + (1 − β₂) Δ̄² sign(Δ̄² − v), so that v decays as Adam's, too (OpenFL)."""

    def _adaptive(self, cohort):
        keys, mean = self.keys, self.mean(self.deltas(cohort))
        m = keys["beta1"] * self.server.get("m", 0.0) + (1 - keys["beta1"]) * mean
        v = self.server.get("v", np.zeros_like(mean))
        v = keys["beta2"] * v + (1 - keys["beta2"]) * np.sign(mean**2 - v) * mean**2
        self.server.update(m=m, v=v)
        m, v = m / (1 - keys["beta1"] ** self.t), v / (1 - keys["beta2"] ** self.t)
        self.w = self.w - keys["server_lr"] * m / (np.sqrt(v) + keys["tau"])


class NiidBench(AfterMomentum):
    """c and all c_i start at one and the same model, not at 0 (NIID-Bench; there a second one, here the first)."""

    def first_c(self):
        return self.initial


class OptaxYogi(Method):
    """Both moments start at 1e-6, and are freed of their bias as if they had started at 0 (FedJAX, by Optax)."""

    def _adaptive(self, cohort):
        keys, mean = self.keys, self.mean(self.deltas(cohort))
        start = np.full_like(mean, 1e-6)
        m = keys["beta1"] * self.server.get("m", start) + (1 - keys["beta1"]) * mean
        v = self.server.get("v", start)
        v = v - (1 - keys["beta2"]) * np.sign(v - mean**2) * mean**2
        self.server.update(m=m, v=v)
        m, v = m / (1 - keys["beta1"] ** self.t), v / (1 - keys["beta2"] ** self.t)
        self.w = self.w - keys["server_lr"] * m / (np.sqrt(v) + keys["tau"])
