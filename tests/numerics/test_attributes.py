"""Attributes of a user's module beside parameters and buffers: which pass from client to client, and which do not."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hpcfed
from hpcfed.models.attributes import ModuleAttributes
from tests.mpi.recipes import small, write_small

pytestmark = pytest.mark.one_mpi


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class Keeping(nn.Module):
    """Keeps one of each kind."""

    def __init__(self):
        super().__init__()
        self.layer, self.rnn = nn.Linear(2, 2), nn.LSTM(2, 2)
        self.hidden, self.pair, self.table = None, (torch.zeros(2), torch.ones(2)), torch.arange(3.0)
        self.calls, self.name, self.shape, self.settings = 0, "net", (2, 3), {"a": 1, "b": [2.5]}
        self.weights, self.view = [self.layer.weight], self.layer.weight[:1]
        self.state, self.cache, self.named = [torch.zeros(2)], {}, Pair(torch.zeros(2), torch.ones(2))
        self.history, self.last = [], deque([torch.zeros(1)], maxlen=1)


def test_tensors_begin_anew_and_numbers_are_named():
    module = Keeping()
    before = {name: value for name, value in vars(module).items() if name != "training"}
    attributes = ModuleAttributes(module)
    attributes.reset()
    assert all(vars(module)[name] is value for name, value in before.items())
    assert not list(attributes.news())
    module.hidden, module.added = (torch.ones(2), torch.ones(2)), torch.ones(2)
    module.table += 1
    module.pair[1].zero_()
    module.calls, module.settings["a"] = 7, 2
    attributes.reset()
    assert module.hidden is None
    assert not hasattr(module, "added")
    assert module.table.tolist() == [0, 1, 2]
    assert [one.tolist() for one in module.pair] == [[0, 0], [1, 1]]
    assert (module.calls, module.settings["a"]) == (7, 2)
    line, another = attributes.news()
    assert line.startswith("the model's calls change Keeping.calls, which passes from client to client")
    assert another.startswith("the model's calls change Keeping.settings, which passes")
    for _ in range(2):
        module.hidden, module.name = [torch.ones(2)], np.ones(2)
        module.state[0], module.cache["k"] = torch.ones(2), torch.ones(2)
        module.named.c.zero_()
        module.last.append(torch.ones(1))
        module.new = [torch.ones(2)]
        attributes.reset()
        assert (module.hidden, module.cache, hasattr(module, "new")) == (None, {}, False)
        assert (module.state[0].tolist(), module.named.c.tolist()) == ([0, 0], [1, 1])
        assert (module.last[0].tolist(), module.last.maxlen) == ([0], 1)
    assert not list(attributes.news())
    module.seen, module.shape = {1}, (*module.shape,)
    attributes.reset()
    assert not list(attributes.news())
    module.history.append(0.5)
    module.seen.add(2)
    attributes.reset()
    assert {line.split()[4] for line in attributes.news()} == {"Keeping.seen,", "Keeping.history,"}
    module.name = "other"
    attributes.reset()
    assert len(list(attributes.news())) == 1
    assert module.weights[0] is module.layer.weight


class Of(tuple):
    """A tuple of another class, whose members cannot be given as one."""

    def __new__(cls, h: torch.Tensor, c: torch.Tensor) -> Of:
        return super().__new__(cls, (h, c))


class Sharing(nn.Module):
    """Keeps objects that others hold, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.inner, self.means, self.by_name, self.acts = nn.Linear(2, 2), [self.mean], {"mean": self.mean}, {}
        self.inner.extra, self.of, self.deep = self.acts, Of(torch.zeros(1), torch.ones(1)), [[torch.zeros(1), None], 0]


def test_what_others_hold_too_stays_the_same_object():
    module = Sharing()
    attributes, acts = ModuleAttributes(module), module.acts
    for _ in range(2):
        module.acts["x"] = torch.ones(2)
        module.mean.fill_(3.0)
        module.deep[0][1] = module.deep[0][0] = torch.ones(1)
        module.deep[1] += 1
        attributes.reset()
        assert module.acts is acts
        assert module.inner.extra is acts
        assert not acts
        assert module.means[0] is module.mean
        assert module.by_name["mean"] is module.mean
        assert module.mean.tolist() == [3.0, 3.0]
        assert module.deep == [[torch.zeros(1), None], 0]
    assert not list(attributes.news())


RECURRENT = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head, self.hidden = nn.LSTM(4, 5), nn.Linear(5, 4), None

    def forward(self, x):
        y, state = self.rnn(x.view(len(x), 3, 4).transpose(0, 1), self.hidden)
        return self.head(y[-1])
"""


def test_a_recurrent_model_trains_from_initial_weights_in_a_file(tmp_path: Path):
    """Its layer keeps its weights in a list, too, which must stay the parameters that are trained."""
    write_small(tmp_path)
    (tmp_path / "recurrent.py").write_text(RECURRENT)
    own = {"data": str(tmp_path / "small.h5"), "python_path": [str(tmp_path)], "rounds": 1}
    first = hpcfed.run(small(tmp_path / "first", **own, model={"factory": "recurrent:Net"}), quiet=True)
    drawn = np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    began = first.folder / "model.safetensors"
    model = {"factory": "recurrent:Net", "init": str(began)}
    then = hpcfed.run(small(tmp_path / "then", **own, model=model), quiet=True)
    assert drawn == (np.random.get_state()[1].tolist(), random.getstate())  # noqa: NPY002
    start, end = load_file(began), load_file(then.folder / "model.safetensors")
    assert all(not torch.equal(start[name], end[name]) for name in start)
