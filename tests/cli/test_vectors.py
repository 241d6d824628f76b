"""The shipped vectors are what is computed here, and enough for a framework of a few lines of NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfed.algorithms import names
from tests.launch import ROOT

pytestmark = pytest.mark.one_mpi

SHIPPED = ROOT / "docs" / "vectors.json"


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return json.loads(SHIPPED.read_text())


def flat(parameters: Mapping[str, Any]) -> np.ndarray:
    """The bias and the weight as one vector."""
    return np.concatenate([np.ravel(parameters[name]) for name in ("bias", "weight")])


def gradient(y: np.ndarray, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax(W x + b)."""
    bias, weight = y[:3], y[3:].reshape(3, 3)
    z = x @ weight.T + bias
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    p /= len(labels)
    return np.concatenate([p.sum(axis=0), (p.T @ x).ravel()])


class Numpy:
    """Six methods, as their papers have them."""

    def __init__(self, method: str, algorithm: Mapping[str, Any], w: np.ndarray):
        self.method, self.keys, self.w = method, algorithm, w
        self.v, self.c, self.h = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
        self.own: dict[str, np.ndarray] = {}

    def client(self, client: str, batches: list, data: Mapping[str, Any], lr: float) -> np.ndarray:
        x, labels, w, own = np.array(data["x"]), np.array(data["y"]), self.w, self.own.setdefault(client, 0 * self.w)
        y = w.copy()
        for batch in batches:
            g = gradient(y, x[batch], labels[batch])
            if self.method == "fedprox":
                g += self.keys["mu"] * (y - w)
            if self.method == "scaffold":
                g += self.c - own
            if self.method == "feddyn":
                g += self.keys["alpha"] * (y - w) - own
            y = y - lr * g
        return w - y

    def round(self, row: Mapping[str, Any], clients: list[Mapping[str, Any]]) -> np.ndarray:
        batches, p, keys = row["batches"], row["p"], self.keys
        deltas = [self.client(str(k), batches[str(k)], clients[k], row["lr"]) for k in row["cohort"]]
        mean, server_lr = sum(share * delta for share, delta in zip(p, deltas, strict=True)), keys.get("server_lr", 1.0)
        if self.method == "scaffold":
            psi = [self.c - delta / (3 * row["lr"]) for delta in deltas]
            for k, own in zip(row["cohort"], psi, strict=True):
                self.own[str(k)] = self.own[str(k)] - own
            self.c = self.c - row["q"] * sum(share * own for share, own in zip(p, psi, strict=True))
        if self.method == "feddyn":
            for k, delta in zip(row["cohort"], deltas, strict=True):
                self.own[str(k)] = self.own[str(k)] + keys["alpha"] * delta
            self.h = self.h + keys["alpha"] * row["q"] * mean
            mean = mean + self.h / keys["alpha"]
        if self.method == "fedavgm":
            mean = self.v = keys["beta"] * self.v + mean
        if self.method == "fedexp":
            norms = sum(share * delta @ delta for share, delta in zip(p, deltas, strict=True))
            server_lr = max(1.0, norms / (2 * (mean @ mean + keys["eps"])))
        self.w = self.w - server_lr * mean
        return self.w


@pytest.mark.parametrize("method", ["fedavg", "fedavgm", "fedprox", "fedexp", "scaffold", "feddyn"])
def test_another_framework_follows_them(method, content):
    own = content["methods"][method]
    numpy = Numpy(method, own["algorithm"], flat(own["initial"]))
    for row in own["rounds"]:
        found = numpy.round(row, content["problem"]["clients"])
        assert np.abs(found - flat(row["w"])).max() < 1e-13 * np.abs(found).max() * len(own["rounds"]) * 10


def test_the_shipped_vectors_are_of_every_method_and_agree(content, tmp_path, command):
    assert list(content["methods"]) == list(names()), f"hpcfed vectors {SHIPPED.name} adds a method's"
    done = command(["vectors", SHIPPED, "--check"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("agrees") == len(names())
    content["methods"]["fedavg"]["rounds"][2]["w"]["bias"][1] += 1e-9
    content["methods"]["scaffold"]["rounds"][1]["cohort"].reverse()
    (tmp_path / "other.json").write_text(json.dumps(content))
    done = command(["vectors", "other.json", "--check"], tmp_path)
    assert done.returncode == 1
    differing = [line for line in done.stdout.splitlines() if "differs" in line]
    assert [line.partition(" (")[0] for line in differing] == ["fedavg: differs", "scaffold: differs"]
    assert differing[0].endswith(", in round 3)")
    assert differing[1] == "scaffold: differs (inf, in round 2)"


@pytest.mark.parametrize("text", ["{}", "[1", '{"format": "hpcfed-vectors", "version": 2}'])
def test_other_files_are_refused(text, tmp_path, command):
    Path(tmp_path / "other.json").write_text(text)
    done = command(["vectors", "other.json", "--check"], tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
