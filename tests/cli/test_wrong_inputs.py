"""Wrong input: one line that names it, exit code 2 on every rank, and the user's files unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import h5py
import pytest
import torch
from safetensors.torch import save_file

import hpcfed
from hpcfed.cli.main import _in_a_line
from hpcfed.config.load import dump_yaml, load_recipe, load_recipes
from hpcfed.errors import InputError
from hpcfed.io.text import parse_yaml
from hpcfed.ranks import world
from hpcfed.run_folder.rounds import count_rounds, read_rounds
from tests.launch import Completed, launch, own_lines
from tests.mpi.recipes import write_recipe, write_small
from tests.soak import often


@dataclass(frozen=True)
class Wrong:
    """A wrong input: the command's arguments in the folder of `prepared`, and what its one line must contain."""

    args: str
    says: tuple[str, ...]


RUN = "run recipe.yaml "

ISSUE: Mapping[str, Wrong] = {
    "unknown-key": Wrong(RUN + "rouns=3", ("'rouns'", "did you mean 'rounds'?")),
    "other-programs-key": Wrong(RUN + "clients_per_round=3", ("'clients_per_round'", "did you mean 'cohort.size'?")),
    "key-of-the-launcher": Wrong(RUN + "num_gpus=2", ("'num_gpus'", "the launcher says how many: mpiexec -n")),
    "wrong-type": Wrong(RUN + "rounds=many", ("rounds", "integer", "'many'")),
    "negative-step-size": Wrong(RUN + "local.lr=-0.1", ("local.lr", "greater than 0", "-0.1")),
    "missing-data": Wrong(RUN + "data=absent.h5", ("absent.h5", "no such federation file", "hpcfed prepare")),
    "truncated-hdf5": Wrong(RUN + "data=truncated.h5", ("truncated.h5", "truncated", "prepare it again")),
    "not-a-federation": Wrong(RUN + "data=other.h5", ("other.h5", "not a federation", "format='hpcfed-federation'")),
    "wrong-version": Wrong(RUN + "data=version.h5", ("version.h5", "expected version 1, got 7", "prepare it again")),
    "too-few-outputs": Wrong("run factory.yaml", ("output", "4 classes for each of 2 samples", "(2, 7)")),
    "cohort-too-large": Wrong(RUN + "cohort.size=6", ("cohort.size", "5 clients", "got 6", "smaller")),
    "output-below-a-file": Wrong(RUN + "output=text.h5/run", ("text.h5/run", "choose another output")),
    "other-run-there": Wrong(RUN + "output=other-run", ("other-run", "local.lr 0.5 there and 0.1 here", "another")),
    "absent-client": Wrong(RUN + "cohort.schedule=absent.json", ("absent.json", "round 2", "no client 9", "0 to 4")),
}
"""The twelve that a release must never miss (see the soak test)."""
ON_SEVERAL_RANKS = often(("unknown-key", "too-few-outputs"), ISSUE)
"""One that is found in the recipe, and one in the model, once torch is loaded."""

MORE: Mapping[str, Wrong] = {
    "text-instead-of-hdf5": Wrong(RUN + "data=text.h5", ("text.h5", "not an HDF5 file", "hpcfed prepare")),
    "init-of-another-type": Wrong(RUN + "model.init=whole.safetensors", ("'0.bias'", "torch.float32", "torch.int8")),
    "init-of-another-shape": Wrong(RUN + "model.init=init.safetensors", ("'0.weight'", "(8, 12)", "(8, 13)")),
    "output-on-a-read-only-disk": Wrong(RUN + "output=/proc/hpcfed", ("/proc/hpcfed", "choose another output")),
    "home-of-nobody": Wrong(RUN + "data=~hpcfed-nobody/x.h5", ("path ~hpcfed-nobody/x.h5", "home folder", "write the")),
    "foreign-files-there": Wrong(RUN + "output=foreign", ("foreign", "thesis.tex", "choose another output")),
    "step-size-beyond-bounds": Wrong(
        RUN + 'local.lr_schedule=[{"round":2,"lr":1e20}]', ("lr_schedule.lr", "magnitude", "got 1e+20")
    ),
    "budget-of-a-schedule-and-a-range": Wrong(
        RUN + 'budget={"schedule":"budgets.json","low":2}', ("budget", "either 'low' and 'high', or 'schedule'")
    ),
    "secret-without-noise": Wrong(
        RUN + "secret_seed=seed.txt", ("hpcfed: recipe.yaml: expected 'noise' in 'means', 'updates' or 'local' beside",)
    ),
    "guesses-beyond-bounds": Wrong(RUN + "guess=1000000001", ("guess", "a number of steps up to 1000000000")),
    "cohort-of-hardly-anybody": Wrong(
        RUN + 'cohort={"fraction":1e-5,"sampling":"bernoulli","stream":"authors"}',
        ("cohort.fraction", "at least 0.002"),
    ),
    "absent-client-in-the-recipe": Wrong(
        RUN + "cohort.schedule=[[0],[9]]", ("schedule: round 2", "no client 9", "0 to 4")
    ),
    "schedule-of-names": Wrong(RUN + "cohort.schedule=[[a]]", ("cohort.schedule", "such as [[0], [1]]", "got [['a']]")),
    "schedule-too-short": Wrong(RUN + "cohort.schedule=short.json", ("short.json", "3 rounds", "1 lists")),
    "unknown-method": Wrong(RUN + "algorithm.name=fedexpp", ("'fedexpp'", "did you mean 'fedexp'?")),
    "unknown-method-key": Wrong(RUN + "algorithm.server_rl=1", ("'algorithm.server_rl'", "'server_lr'")),
    "missing-alpha": Wrong(RUN + "algorithm.name=feddyn", ("recipe.yaml: key 'algorithm.alpha'", "missing", "add it")),
    "unknown-model": Wrong(RUN + "model.name=mpl", ("hpcfed: recipe.yaml: unknown model.name 'mpl'", "mean 'mlp'?")),
    "model-in-capitals": Wrong(RUN + "model.name=MLP", ("'MLP'", "did you mean 'mlp'?")),
    "key-in-capitals": Wrong(RUN + "LR=0.1", ("unknown key 'LR'", "did you mean 'local.lr'?")),
    "quoted-number-beyond-floats": Wrong(RUN + "rounds='" + "1" * 400 + "'", ("rounds: expected a valid integer",)),
    "misspelt-name-of-a-method": Wrong(
        RUN + "algorithm.nmae=1", ("unknown key 'algorithm.nmae'", "did you mean 'name'?")
    ),
    "misspelt-name-of-a-model": Wrong(RUN + "model.namz=mlp", ("unknown key 'model.namz'; did you mean 'name'?",)),
    "word-for-a-list-of-numbers": Wrong(RUN + "model.hidden=x", ("model.hidden: expected a list, got 'x'",)),
    "number-for-a-list": Wrong(RUN + "model.hidden=64", ("model.hidden: expected a list, got 64; did you mean [64]?",)),
    "number-as-a-name": Wrong(RUN + "name=1", ("name: expected text, got 1; put it in quotes: name: '1'",)),
    "pattern-without-list": Wrong(
        RUN + "parameters.frozen=0.*", ("parameters.frozen: expected a list, got '0.*'; did you mean ['0.*']?",)
    ),
    "client-without-list": Wrong(
        RUN + "cohort.without.clients=1", ("without.clients: expected a list, got 1; did you mean [1]?",)
    ),
    "schedule-without-list": Wrong(
        RUN + "local.lr_schedule.round=3", ("local.lr_schedule: expected a list, such as [{round: 51, lr: 0.05}], got",)
    ),
    "one-of-seeds": Wrong(RUN + "seeds=1", ("got 1; seed=1 runs one, seeds=[0, 1, 2] each of them",)),
    "empty-list": Wrong(RUN + "cohort.without=[]", ("cohort.without.clients: expected one entry or more, got []",)),
    "no-for-off": Wrong(RUN + "sentinel=no", ("sentinel: expected 'on', 'off'", "got 'no'; did you mean 'off'?")),
    "percentage": Wrong(RUN + "cohort=50%", ("cohort: expected", "got '50%'; did you mean 0.5?")),
    "quoted-number": Wrong(RUN + 'rounds="3"', ("recipe.yaml: rounds", "'3'; did you mean 3, without quotes?")),
    "several-numbers": Wrong(RUN + "local.lr=0.01,0.05", ("local.lr", "hpcfed sweep … -g local.lr=0.01,0.05")),
    "list-of-numbers": Wrong(RUN + "rounds=[5,10]", ("rounds", "hpcfed sweep … -g rounds=5,10")),
    "decimal-comma": Wrong(RUN + "local.lr=0,05", ("local.lr", "'0,05'; did you mean 0.05?")),
    "whole-number-as-a-real-one": Wrong(RUN + "rounds=3.0", ("rounds", "3.0; did you mean 3?")),
    "truth-of-yaml-1.1": Wrong(RUN + "update_hashes=yes", ("expected true or false, got 'yes'; did you mean true?",)),
    "file-name-of-a-module": Wrong(
        "run factory.yaml model.factory=outputs.py:seven", ("'outputs.py:seven'", "did you mean 'outputs'? looked in")
    ),
    "model-of-one-sample": Wrong(
        "run factory.yaml model.factory=outputs:first", ("4 classes for each of 2 samples, got shape (1, 4)",)
    ),
    "model-cut-from-its-parameters": Wrong(
        "run factory.yaml model.factory=outputs:detached", ("does not depend on its parameters", "detach")
    ),
    "model-without-shapes": Wrong(
        "run factory.yaml model.factory=outputs:lazy", ("parameters with shapes, got 'weight'", "nn.Linear")
    ),
    "error-outside-of-exception": Wrong("run factory.yaml model.factory=outputs:cancelled", ("in cancelled", "Cancel")),
    "missing-factory": Wrong("run factory.yaml model.factory=nowhere:build", ("nowhere:build", "nowhere", "looked in")),
    "model-that-raises": Wrong(
        "run factory.yaml model.factory=outputs:narrow loss.factory=torch.nn:CrossEntropyLoss",
        ("cannot take a sample", "mat1", "outputs.py, line 14, in forward"),
    ),
    "two-outputs": Wrong(
        "run factory.yaml model.factory=outputs:both",
        ("the model's output: expected a tensor of 4 classes, got a tuple of 2; return the tensor alone",),
    ),
    "number-of-checkpoints": Wrong(
        RUN + "checkpoint.keep=spaecd",
        ("checkpoint.keep: expected a whole number from 1 to", "or 'spaced', got 'spaecd'; did you mean 'spaced'?"),
    ),
    "loss-without-a-gradient": Wrong(
        RUN + "loss.factory=outputs:cut", ("does not depend on the model's parameters", "detach")
    ),
    "name-of-a-metric": Wrong(
        RUN + 'evaluate.metrics={"my.recall":"outputs:recall"}',
        ("evaluate.metrics.my.recall: expected a name of letters, digits, _ and -", "got 'my.recall'"),
    ),
    "name-with-a-slash": Wrong(RUN + "name=a/b", ("name: expected letters, digits, spaces and . _ -", "'a/b'")),
    "missing-function": Wrong("run factory.yaml model.factory=outputs:sevn", ("'sevn'", "did you mean 'seven'?")),
    "unknown-command": Wrong("rum recipe.yaml", ("'rum'", "did you mean 'run'?")),
    "unknown-option": Wrong(RUN + "--quit", ("no option '--quit'; did you mean '--quiet'?",)),
    "key-as-an-option": Wrong(RUN + "--lr 0.1", ("no option '--lr'; a key of the recipe has no dashes: local.lr=… (",)),
    "option-elsewhere": Wrong(RUN + "--resume", ("no option '--resume'; the same command goes on from the last",)),
    "option-like-others": Wrong("prepare own --targt y", ("no option '--targt'; did you mean '--target'? (see",)),
    "option-like-none": Wrong(RUN + "--zzzz", ("No such option", "--zzzz", "(see 'hpcfed run --help')")),
    "certificate-of-no-run": Wrong("certify absent", ("absent: no such run; name the output folder of a run",)),
    "certificate-of-a-folder": Wrong("certify foreign", ("foreign: not a run folder; name the output folder",)),
    "bad-override": Wrong(RUN + "rounds", ("'rounds'", "section.key=value")),
    "override-with-a-comment": Wrong(RUN + "output=#1", ("a value without a comment, got '#1'; quote",)),
    "override-below-a-value": Wrong(RUN + "rounds.more=3", ("rounds.more=3", "'rounds'", "section")),
    "init-of-another-kind": Wrong(
        RUN + "model.init=text.h5",
        ("model.init cannot be read", "name a safetensors file with the module's parameters"),
    ),
    "init-of-a-folder": Wrong(
        RUN + "model.init=foreign", ("foreign: model.init: is a folder; name a safetensors file",)
    ),
    "schedule-of-another-kind": Wrong(
        RUN + "cohort.schedule=text.h5", ("text.h5 cannot be read", "a JSON list over rounds of lists of whole numbers")
    ),
    "code-of-no-folder": Wrong(
        "verify other-run --seed 1 --code absent",
        ("--code absent: not a folder; name the folder of the recorded code",),
    ),
    "arrays-as-a-table": Wrong(
        "prepare own --raw one.npz -o a.h5", ("one.npz: no table", "of arrays and images name the folder")
    ),
    "folder-as-a-recipe": Wrong("run foreign", ("foreign: is a folder, not a recipe; name the YAML file",)),
    "data-as-a-recipe": Wrong(
        "run version.h5", ("version.h5: cannot be read as text", "a recipe is a YAML file in UTF-8")
    ),
    "malformed-yaml": Wrong("run malformed.yaml", ("malformed.yaml", "not valid YAML at line 2")),
    "missing-recipe": Wrong("run absent.yaml", ("absent.yaml", "no such recipe", "check the path")),
    "step-size-at-the-top": Wrong(RUN + "lr=0.1", ("unknown key 'lr'", "did you mean 'local.lr'?")),
    "model-key-at-the-top": Wrong(RUN + "hidden=[8]", ("'hidden'", "did you mean 'model.hidden'?")),
    "method-key-at-the-top": Wrong(RUN + "server_lr=2", ("'server_lr'", "did you mean 'algorithm.server_lr'?")),
    "key-of-two-sections": Wrong(RUN + "batch_size=5", ("'local.batch_size' or 'evaluate.batch_size'?",)),
    "clients-at-the-top": Wrong(
        RUN + "clients=10", ("'clients'", "as data are prepared: hpcfed prepare … --clients N")
    ),
    "noise-at-the-top": Wrong(RUN + "epsilon=8", ("'epsilon'", "a part of updates or means, or local.noise: docs/")),
    "key-like-none": Wrong(RUN + "verbose=true", ("unknown key 'verbose'; known: algorithm, ",)),
    "key-without-its-line": Wrong(RUN + "batchsize=8", ("did you mean 'local.batch_size' or 'evaluate.batch_size'?",)),
    "another-optimizer": Wrong(
        RUN + "local.optimizer=AdamW", ("got 'AdamW'; another optimizer is", "local.step (docs")
    ),
    "method-s-key-by-another-name": Wrong(
        RUN + 'algorithm={"name":"fedadam","lr":1}',
        ("unknown key 'algorithm.lr' for fedadam; did you mean 'server_lr'?",),
    ),
    "part-without-its-key": Wrong(
        RUN + 'updates=[{"clip":0.5}]', ("updates: expected the keys of clip in a mapping", "{clip: {norm: 1.0}}")
    ),
    "metric-of-yours-without-a-name": Wrong(
        RUN + "evaluate.metrics=[outputs:recall]", ("got 'outputs:recall'; name it: [{recall: 'outputs:recall'}]",)
    ),
    "output-in-a-mapping": Wrong(
        "run factory.yaml model.factory=outputs:named", ("got a dict of 2; return one tensor", "as output['logits']")
    ),
    "metrics-at-the-top": Wrong(RUN + "metrics.f1=f1", ("'metrics'", "did you mean 'evaluate.metrics'?")),
    "metric-without-module": Wrong(RUN + "evaluate.metrics.f1=f1", ("metrics.f1", "'module:function'", "got 'f1'")),
    "metric-like-a-built-in-one": Wrong(RUN + "evaluate.metrics=[aucroc]", ("got 'aucroc'; did you mean 'auroc'?",)),
    "metric-that-is-measured-anyway": Wrong(RUN + "evaluate.metrics=[accuracy]", ("leave it out: it is measured",)),
    "direction-of-a-metric": Wrong(
        RUN + 'evaluate.metrics={"r":{"whole":"outputs:recall","better":"highr"}}',
        ("evaluate.metrics.r.better: expected 'higher' or 'lower', got 'highr'; did you mean 'higher'?",),
    ),
    "misspelt-direction": Wrong(
        RUN + 'evaluate.metrics={"r":{"whole":"outputs:recall","bettr":"higher"}}',
        ("got the keys whole, bettr; did you mean 'better'?",),
    ),
    "misspelt-whole": Wrong(
        RUN + 'evaluate.metrics={"r":{"hole":"outputs:recall"}}', ("got the keys hole; did you mean 'whole'?",)
    ),
    "a-word-or-a-number": Wrong(
        RUN + "local.tile=0", ("local.tile: expected 'auto' or greater than or equal to 1, got 0",)
    ),
    "a-word-or-a-number-of-a-part": Wrong(
        RUN + 'updates=[{"quantize":{"bits":8,"block":0}}]', ("expected 'tensor' or greater than or equal to 2, got 0",)
    ),
    "key-of-a-part-beside-its-name": Wrong(
        RUN + 'updates=[{"name":"quantize","bits":8}]', ("below its name: updates: [{NAME: {bits: …}}]",)
    ),
    "device-by-another-name": Wrong(
        RUN + "device=GPU", ("device: expected 'auto', ", "got 'GPU'; did you mean 'cuda'")
    ),
    "misspelt-name-beside-a-factory": Wrong(
        "run factory.yaml model.nme=mlp", ("unknown key 'model.nme'; did you mean 'name'?",)
    ),
    "argument-beside-a-factory": Wrong(
        "run factory.yaml model.hidden=3", ("'model.hidden'; a factory's arguments go under 'args'",)
    ),
    "two-seeds-for-one": Wrong(RUN + "seed=[0,1]", ("seed: expected one seed, got [0, 1]", "seeds=[0, 1]")),
    "a-family-of-methods": Wrong(
        RUN + "algorithm.name=fedopt", ("'fedopt'", "fedadam, fedyogi, fedadagrad", "fedavgm")
    ),
    "a-method-we-lack": Wrong(RUN + "algorithm=apfl", ("'apfl'", "known: ditto, dsgd, fedadagrad,")),
    "private-layers": Wrong(RUN + "algorithm=FedPer", ("'FedPer'", "any method", "parameters.private")),
    "private-everything": Wrong(
        RUN + 'parameters.private=["*"] evaluate.every=0', ("parameters.private", "nothing is left to average")
    ),
    "pattern-without-a-match": Wrong(
        RUN + 'parameters.frozen=["head.*"]', ("parameters.frozen", "'head.*' matches no parameter")
    ),
    "alias-of-a-key": Wrong(RUN + 'stop={"test_loss":1}', ("'stop.test_loss'; known: for, max_hours, ",)),
    "stop-by-what-is-not-evaluated": Wrong(
        RUN + 'stop={"metric":"auroc","patience":3}', ("stop.metric: 'auroc' is not evaluated; add it to",)
    ),
    "stop-at-a-target-of-nothing": Wrong(
        RUN + "stop.target=0.9", ("stop: expected 'metric', which is to reach it, beside 'target'",)
    ),
    "stop-without-an-evaluation": Wrong(
        RUN + 'evaluate.every=0 stop={"metric":"loss","target":0.9}', ("'evaluate.every' of at least 1 beside 'stop'",)
    ),
    "entry-of-a-list": Wrong(
        RUN + 'loss={"weights":[1,1,1,1,-1]}', ("loss.weights.4: expected greater than 0, got -1",)
    ),
    "word-for-a-list": Wrong(RUN + "loss.weights=even", ("loss.weights: expected", "or a list of numbers")),
    "number-for-a-section": Wrong(RUN + "stop=0.9", ("stop: expected a mapping of keys, got 0.9", "test_accuracy")),
    "empty-recipe": Wrong("run empty.yaml", ("empty.yaml: an empty file", "data, model, rounds, local and algorithm")),
    "missing-keys": Wrong("run little.yaml", ("keys 'data', 'model', 'local', 'algorithm' are missing",)),
    "misspelt-section": Wrong("run little.yaml locl.lr=1", ("unknown key 'locl'", "did you mean 'local'?")),
    "step-size-beyond-floats": Wrong(RUN + "local.lr=1e308", ("local.lr", "from 1e-30 to 1e+15", "1e+308")),
    "step-size-that-grows": Wrong(RUN + "local.lr_decay=1e10", ("local.lr_decay", "step size of round 3")),
    "decay-beyond-floats": Wrong(RUN + "local.weight_decay=1e308", ("local.weight_decay", "1e+308")),
    "parameter-beyond-floats": Wrong(RUN + "algorithm.server_lr=1e30", ("algorithm", "server_lr", "1e+30")),
    "rounds-beyond-words": Wrong(RUN + "rounds=1" + "0" * 30, ("whole number beyond 64 bits",)),
    "digits-without-end": Wrong(RUN + "rounds=" + "1" * 5000, ("whole number beyond 64 bits",)),
    "too-many-steps": Wrong(RUN + "local.steps=1000000001", ("local.steps", "1000000000", "1000000001")),
    "too-many-threads": Wrong(RUN + "threads=1000000", ("threads", "1024")),
    "layer-too-wide": Wrong(RUN + "model.hidden=[99999999999]", ("hidden.0", "16777216", "99999999999")),
    "model-larger-than-memory": Wrong(RUN + "model.hidden=[16777216,16777216]", ("does not fit", "parameters", "GB")),
    "python-path-no-list": Wrong(RUN + "python_path=5", ("python_path", "list", "5")),
    "type-of-python": Wrong(RUN + "name=!!python/name:os.system", ("python/name:os.system", "not plain data")),
    "set-of-yaml": Wrong("run set.yaml", ("set.yaml", "line 1", "2002:set", "not plain data")),
    "nested-too-deep": Wrong("run deep.yaml", ("deep.yaml", "line 1", "nested more than 64 deep")),
    "many-aliases": Wrong("run aliases.yaml", ("aliases.yaml", "more than 50,000 values")),
    "aliases-of-a-long-text": Wrong("run long.yaml", ("long.yaml", "texts of more than 1,048,576 characters")),
    "schedule-nested-too-deep": Wrong(RUN + "cohort.schedule=deep.json", ("deep.json", "nested more than 64 deep")),
    "schedule-without-end": Wrong(RUN + "cohort.schedule=/dev/zero", ("/dev/zero", "neither a file nor a pipe")),
    "recipe-without-end": Wrong("run /dev/zero", ("/dev/zero", "neither a file nor a pipe")),
    "path-without-end": Wrong(RUN + "data=" + "b/" * 2000 + "c.h5", ("…", "b/c.h5", "hpcfed prepare")),
    "name-that-is-no-path": Wrong(RUN + "data=" + "a" * 300, ("aaa", "hpcfed prepare")),
    "unset-variable": Wrong(RUN + "data=$HPCFED_UNSET/a.h5", ("$HPCFED_UNSET", "to be set")),
}
FACTORIES = """
import torch
from torch import nn
def seven():
    return nn.Linear(12, 7)


def narrow():
    return Narrow(3, 4)


class Narrow(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def both():
    return Both(12, 4)


class Both(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def named():
    return Named(12, 4)


class Named(nn.Linear):
    def forward(self, x):
        return {"hidden": x, "logits": super().forward(x)}


def cut():
    return lambda output, target: output.detach().square().sum(1)


def recall(output, target):
    return 1.0, 2.0


class First(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:1]


def first():
    return First(12, 4)


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


def detached():
    return Detached(12, 4)


class Frugal(nn.Sequential):
    def forward(self, x):
        if self.training:
            return super().forward(x)
        with torch.no_grad():
            return super().forward(x)


def frugal():
    return Frugal(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def best_of_two(parameters, batch, context):
    found = [parameters, parameters + torch.from_numpy(context.random.normal(size=len(parameters))).float() / 100]
    losses = [float(context.loss(context.output(one, batch[0]).detach(), batch[1])) for one in found]
    return found[losses[1] < losses[0]], min(losses)


def lazy():
    return nn.LazyLinear(4)


class Cancel(BaseException):
    pass


def cancelled():
    raise Cancel("no exception")


class Lasting:
    def start(self, run):
        import threading

        threading.Thread(target=threading.Event().wait, name="lasting").start()

    def round(self, row):
        pass
"""

YAML = {
    "model:\n\tname: mlp\n": "line 2: found a tab; indent by spaces",
    "a: 1\nrounds:3\nb: 2\n": "line 3: while scanning a simple key from line 2, found no ':' with a space after it",
    "a: 'x\nb: 1\n": "line 3: while scanning a quoted scalar from line 1, found unexpected end of stream",
    "local: {lr: 0,05}\n": r"line 1: a key that is not text \(05\): quote it",
    "rounds:3 data:x\n": "expected a mapping of keys, got 'rounds:3 data:x'; a space follows the colon",
}


@pytest.mark.one_mpi
def test_a_complaint_about_the_whole_recipe_lists_none_of_its_keys(tmp_path):
    write_recipe(tmp_path, local={"epochs": 1})
    with pytest.raises(InputError, match=r"'local\.steps' instead of 'local\.epochs' beside 'budget'$"):
        load_recipe(tmp_path / "recipe.yaml", ["budget.low=1", "budget.high=2"])


@pytest.mark.one_mpi
@pytest.mark.parametrize("text", YAML)
def test_a_mistake_in_yaml_is_reported_with_its_line(text, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(InputError, match=YAML[text]):
        load_recipe(tmp_path / "wrong.yaml")


@pytest.mark.one_mpi
def test_a_file_of_any_claimed_size_is_refused_before_it_is_read(tmp_path):
    for name in ("wrong.yaml", "metrics.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)  # sparse
    with pytest.raises(InputError, match="larger than 1,048,576 bytes"):
        load_recipe(tmp_path / "wrong.yaml")
    for read in (count_rounds, read_rounds):
        with pytest.raises(InputError, match=r"metrics\.jsonl: a line of more than"):
            read(tmp_path / "metrics.jsonl")


THREAD = """
import sys, hpcfed.__main__, hpcfed.ranks.world
hpcfed.ranks.world.LINGER = 1.0
sys.argv[1:] = ["run", "recipe.yaml", "-q", "rounds=1", "observers=[{factory: 'outputs:Lasting'}]", "output=lasting"]
hpcfed.__main__.main()
"""


@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", often([0], [0, 2]))
def test_a_thread_of_the_users_does_not_keep_the_process(ranks, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    done = launch(ranks, [], cwd=tmp_path, program=("-c", THREAD))
    lines = own_lines(done.stderr)
    assert (done.returncode, len(lines)) == (0, 1), done.stderr
    assert "waits 1 s at most for your thread lasting" in lines[0]


@pytest.mark.one_mpi
def test_only_warnings_of_its_own_code_are_lines_of_the_program():
    """Those of a folder beside it whose name begins alike have their place."""
    package = Path(hpcfed.__file__).parent
    own, other = (
        _in_a_line("odd", UserWarning, str(path), 3)
        for path in (package / "loaded.py", package.with_name("hpcfed_mine") / "net.py")
    )
    assert own == "hpcfed: odd\n"
    assert other.startswith(f"{package}_mine")


@pytest.mark.one_mpi
def test_a_process_that_ends_slowly_is_not_cut_short_for_a_thread_that_has_ended(monkeypatch, capfd):
    """What takes its time may be a function of ``atexit``."""
    (thread := threading.Thread(target=str)).start()
    ended: list[int] = []
    monkeypatch.setattr(world, "LINGER", 0.0)
    monkeypatch.setattr(world.os, "_exit", ended.append)
    monkeypatch.setattr(world, "start", lambda watcher: watcher.run())
    monkeypatch.setattr(world.threading, "enumerate", lambda: [thread])
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    thread.join()
    world.exit_without_threads(0)
    assert (ended, capfd.readouterr().err) == ([], "")


@pytest.mark.one_mpi
@pytest.mark.parametrize("overrides", ["rounds=3", {"rounds": 3}, [3], None])
def test_overrides_are_a_list_of_texts(overrides, prepared):
    with pytest.raises(InputError, match=r"overrides: expected a list of texts .*; such as \['rounds=3'"):
        load_recipe(prepared / "recipe.yaml", overrides)


@pytest.mark.one_mpi
def test_a_recipe_from_python_is_a_path_or_a_mapping_which_may_have_tuples(prepared):
    for wrong in (None, 5, ["recipe.yaml"], b"recipe.yaml"):
        with pytest.raises(InputError, match="the recipe: expected the path of a file, or a mapping of keys"):
            load_recipe(wrong)
    assert load_recipe(PurePath(prepared, "recipe.yaml"), {"rounds=2": None}.keys()).rounds == 2
    whole = parse_yaml((prepared / "recipe.yaml").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(prepared)
        assert load_recipe("recipe.yaml") == load_recipe({**whole, "name": "recipe"})
    found = load_recipe({**whole, "model": {"name": "mlp", "hidden": (8, 4)}, "cohort": {"schedule": ((0, 1), (2,))}})
    assert (found.model.parameters["hidden"], found.cohort.schedule) == ([8, 4], [[0, 1], [2]])


@pytest.mark.one_mpi
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_gradients_are_computed_whatever_the_caller_has_set(without, prepared, tmp_path):
    with pytest.MonkeyPatch.context() as patch, without():
        patch.chdir(prepared)
        found = hpcfed.run("recipe.yaml", [f"output={tmp_path}/run", "rounds=1", "local.engine=sequential"], quiet=True)
    assert found.metrics[0]["delta_sq"] > 0


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    "words",
    [
        ["model.factory=outputs:frugal", "parameters.buffers=averaged"],
        ["model.factory=outputs:detached", "local={step: 'outputs:best_of_two', steps: 2, batch_size: 10, lr: 0.1}"],
    ],
)
def test_models_may_leave_gradients_out_where_none_are_taken(words, prepared, tmp_path):
    """In evaluation, and where a local step of the user's own takes none."""
    found = hpcfed.run(prepared / "factory.yaml", [f"output={tmp_path}/run", "rounds=1", *words], quiet=True)
    assert found.metrics[0]["delta_sq"] > 0


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a valid recipe and many invalid files."""
    folder = tmp_path_factory.mktemp("wrong")
    data = write_small(folder).read_bytes()
    write_recipe(folder)
    write_recipe(folder, "factory.yaml", model={"factory": "outputs:seven"})
    (folder / "truncated.h5").write_bytes(data[: len(data) // 2])
    (folder / "version.h5").write_bytes(data)
    with h5py.File(folder / "version.h5", "r+") as file:
        file.attrs["version"] = 7
    with h5py.File(folder / "other.h5", "w") as file:
        file["images"] = [1.0, 2.0]
    (folder / "text.h5").write_text("label,pixel\n1,0\n")
    (folder / "one.npz").write_bytes(b"PK")
    (folder / "absent.json").write_text(json.dumps([[0, 1], [2, 9], [3, 4]]))
    (folder / "short.json").write_text("[[0, 1]]")
    (folder / "malformed.yaml").write_text("name: a\nrounds: 3: 4\n")
    (folder / "empty.yaml").write_text("# nothing yet\n")
    (folder / "little.yaml").write_text("rounds: 3\n")
    (folder / "set.yaml").write_text("data: !!set {a}\n")
    (folder / "deep.yaml").write_text(f"data: {'[' * 5000}{']' * 5000}\n")
    tenfold = "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 11))
    (folder / "aliases.yaml").write_text(f"a0: &a0 [1]\n{tenfold}name: *a10\n")
    (folder / "long.yaml").write_text(f"name: &a {'x' * 900_000}\nobservers: [{'*a, ' * 20_000}]\n")  # 18 GB of text
    (folder / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    (folder / "outputs.py").write_text(FACTORIES)
    parameters = {"0.weight": (8, 13), "0.bias": (8,), "2.weight": (4, 8), "2.bias": (4,)}
    save_file({name: torch.zeros(shape) for name, shape in parameters.items()}, folder / "init.safetensors")
    fitting = {name: torch.zeros(shape) for name, shape in {**parameters, "0.weight": (8, 12)}.items()}
    save_file({**fitting, "0.bias": torch.zeros(8, dtype=torch.int8)}, folder / "whole.safetensors")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "thesis.tex").write_text("years of work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        hpcfed.run("recipe.yaml", ["output=other-run", "local.lr=0.5"], quiet=True)
    return folder


def give(wrong: Wrong, folder: Path, command: Callable[..., Completed]) -> None:
    """Call the command; check its exit code, its one line, and that no file has changed."""
    before = contents(folder)
    done = command(wrong.args.split(), folder)
    lines = own_lines(done.stderr)
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert lines[0].startswith("hpcfed: ")
    for fragment in wrong.says:
        assert fragment in lines[0]
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder, with a hash of what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def started(ranks: int) -> Callable[..., Completed]:
    """The command as a job of its own."""
    no_cache = {"PYTHONDONTWRITEBYTECODE": "1"}  # Python's own copy of a factory's module is no file of ours
    return lambda arguments, folder: launch(ranks, arguments, cwd=folder, env=no_cache)


@pytest.mark.one_mpi
@pytest.mark.parametrize("name", [*ISSUE, *MORE])
def test_wrong_input_exits_2_with_one_line(name, prepared, command):
    give({**ISSUE, **MORE}[name], prepared, command)


@pytest.mark.parametrize("name", ON_SEVERAL_RANKS)
def test_wrong_input_exits_2_with_one_line_on_several_ranks(name, prepared):
    give(ISSUE[name], prepared, started(2))


@pytest.mark.one_mpi
def test_a_virtual_dataset_does_not_crash_the_end_of_the_process(prepared, tmp_path):
    """HDF5 crashes as it ends where a virtual dataset's property list is left, as in the frames of an error."""
    layout = h5py.VirtualLayout((5, 1, 3, 4), "f4")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "x", layout.shape)
    shutil.copy(prepared / "small.h5", tmp_path / "virtual.h5")
    with h5py.File(tmp_path / "virtual.h5", "r+") as file:
        del file["train/x"]
        file.create_virtual_dataset("train/x", layout)
    write_recipe(tmp_path, data="virtual.h5")
    give(Wrong("run recipe.yaml", ("/train/x lies in another file",)), tmp_path, started(0))


@pytest.mark.soak
@pytest.mark.deadline(3600)
@pytest.mark.parametrize("ranks", [0, 1, 3])
@pytest.mark.parametrize("name", ISSUE)
def test_wrong_input_exits_2_with_one_line_every_time(name, ranks, prepared):
    for _ in range(int(os.environ.get("HPCFED_REPEAT", "20"))):
        give(ISSUE[name], prepared, started(ranks))


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from hpcfed.cli.main import main

def code(arguments):
    try:
        main(arguments)
    except SystemExit as left:
        return left.code

print(json.dumps([code(line.split()) for line in sys.argv[1:]]))
"""


@pytest.mark.one_mpi
def test_wrong_input_is_reported_before_torch_is_loaded(prepared):
    """Errors are reported within a fraction of a second, also on a thousand ranks."""
    early = ["missing-data", "unknown-key", "cohort-too-large", "absent-client", "other-run-there"]
    done = launch(0, [ISSUE[name].args for name in early], cwd=prepared, program=("-c", WITHOUT_TORCH))
    assert json.loads(done.stdout) == [2] * len(early), done.stderr
    for name, line in zip(early, own_lines(done.stderr), strict=True):
        assert all(fragment in line for fragment in ISSUE[name].says)


LIMITED = """
import resource, sys
import torch
from hpcfed.cli.main import main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)
main(["run", "recipe.yaml", "model.hidden=[16384,16384]", "output=run"])
"""


@pytest.mark.one_mpi
def test_a_model_beyond_the_process_limit_is_reported_in_one_line(prepared, tmp_path):
    """The machine has the gigabyte, but a batch system may not give it to the process."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    done = launch(0, [], cwd=tmp_path, program=("-c", LIMITED))
    assert done.returncode == 4, done.stderr
    (line,) = own_lines(done.stderr)
    assert "not enough memory for the model" in line


@pytest.mark.one_mpi
def test_seeds_replace_one_seed_but_not_a_stream_of_its_own(prepared):
    recipe = parse_yaml((prepared / "recipe.yaml").read_text()) | {"data": str(prepared / "small.h5"), "seeds": [3, 4]}
    for seed in (0, {"model": 2, "cohort": 2, "batches": 2}):
        assert [one.seed.cohort for one in load_recipes({**recipe, "seed": seed})] == [3, 4]
    with pytest.raises(InputError, match="both 'seeds' and a 'seed' of each stream"):
        load_recipes({**recipe, "seed": {"cohort": 7}})
    for given in (["seed=7"], ["seed.cohort=7", "seeds=[1, 2]"]):
        with pytest.raises(InputError, match=r"'seed' given beside several seeds, \[., .\]; leave it out"):
            load_recipes(recipe, given)


@pytest.mark.one_mpi
def test_short_forms_are_the_sections_that_they_stand_for(prepared):
    short = ["algorithm=fedprox", "algorithm.mu=0.5", "cohort=3", "model=linear", "loss=outputs:seven"]
    long = ["algorithm={name: fedprox, mu: 0.5}", "cohort={size: 3}", "model={name: linear}"]
    recipes = [load_recipe(prepared / "recipe.yaml", given) for given in (short, [*long, "loss.factory=outputs:seven"])]
    assert recipes[0] == recipes[1]
    assert load_recipe(prepared / "recipe.yaml", ["cohort=0.5"]).cohort.fraction == 0.5


@pytest.mark.one_mpi
@pytest.mark.parametrize("text", ["next\x85line", "\u2028", "'\x85'", "a\nb", "\ufeff", "1", "x" * 130 + "\x85 y"])
def test_what_is_written_as_yaml_is_read_as_it_was(text):
    assert parse_yaml(dump_yaml({"name": text})) == {"name": text}


@pytest.mark.one_mpi
@pytest.mark.parametrize("number", [1e-8, -2e16, 1.5e-9, 0.1])
def test_written_numbers_are_those_of_older_readers_too(number):
    """YAML 1.1, which PyYAML reads, has no numbers with an exponent and without a point or the exponent's sign."""
    text = dump_yaml({"eps": number})
    assert re.fullmatch(r"eps: -?[0-9]+\.[0-9]+(e[-+][0-9]+)?\n", text)
    assert parse_yaml(text) == {"eps": number}


UNUSED = {
    "lr_schedule has a step size from round 9, after the last of 3 rounds; it is not used": "clip",
    "b: name is given more than once; the last, name=b, holds": "clip",
    "local.clip: linear has no effect without local.clip_norm": "clip",
    "stop.patience: 2 has no effect, with 1 evaluation in 3 rounds": "clip",
    "checkpoint.keep: spaced is for early stops alone, since checkpoint.every is 0": "clip",
    "checkpoints at an early stop alone: up to": "clip",
    "dsgd: a round is one step with all samples of a client, whatever else local and budget say": "dsgd",
    "local.momentum: 0.9 has no effect in one step, which starts from none": "dsgd",
    "cohort.sampling: bernoulli has no effect without size or fraction: all clients take part": "guess",
    "guess: remaining has no effect without a budget: all of local.steps are taken": "guess",
    "authors: the cohorts of seed.cohort 7 are those of 0, from round 8 on; cohort: 0 in seed has the": "authors",
    "evaluate.clients: no client is measured, since its every is 0": "guess",
    "evaluate.metrics: f1-macro not measured, since every period of evaluate is 0": "guess",
    "local.steps: 4 has no effect beside budget without guess: remaining": "budget",
    "stop.test_accuracy has no effect with for: 4, with 3 evaluations in 3 rounds": "budget",
    "means: trimmed-mean: fraction 0.1 of 5 clients is less than one: none is trimmed": "budget",
    "updates: attack: no client attacks, with neither clients nor a fraction of them": "budget",
    "updates: attack: factor: 3 has no effect with what: labels": "guess",
    "updates: clip: rate: 0.5 has no effect without quantile": "guess",
    "means: krum needs 5 clients of a cohort's 5; on_bad_client: skip ends the run where it skips any": "dsgd",
}
"""Line → the run of `GIVEN` that has it."""
GIVEN = {
    "clip": [
        *("name=a", "name=b", "local.clip=linear", "stop.patience=2", "evaluate.every=2"),
        *("local.lr_schedule=[{round: 2, lr: 0.1}, {round: 9, lr: 0.01}]", "checkpoint={every: 0, keep: spaced}"),
    ],
    "dsgd": [
        *("algorithm={name: dsgd}", "local.momentum=0.9", "evaluate.every=9"),
        *("means=[{krum: {attackers: 1}}]", "on_bad_client=skip"),
    ],
    "guess": [
        *("cohort.sampling=bernoulli", "local.momentum=0.9", "guess=remaining", "evaluate.every=0"),
        *("evaluate.metrics=[f1-macro]", "evaluate.clients.models=[fine-tuned]"),
        "evaluate.clients.fine_tune={steps: 1, batch_size: 5, lr: 0.1}",
        "updates=[{attack: {what: labels, clients: [1], factor: 3.0}}, {clip: {norm: 1.0, rate: 0.5}}]",
    ],
    "authors": ["cohort={fraction: 0.5, sampling: bernoulli, stream: authors}", "seed=7"],
    "budget": [
        *("budget={low: 1, high: 2}", "stop={test_accuracy: 0.999, for: 4}", "means=[{trimmed-mean: {fraction: 0.1}}]"),
        "updates=[{attack: {factor: 3.0}}]",
    ],
}


@pytest.mark.one_mpi
def test_keys_without_effect_are_reported(prepared, tmp_path, command):
    said = {}
    for name, given in GIVEN.items():
        done = command(["run", "recipe.yaml", *given, f"output={tmp_path / name}"], prepared)
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout
    for line, run in UNUSED.items():
        assert line in said[run]
    assert "stop." not in said["dsgd"]  # a run without one


@pytest.mark.one_mpi
def test_a_good_recipe_in_the_same_folder_runs(prepared, tmp_path, command):
    """Control: the other cases fail only because of their own error."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    done = command(["run", "recipe.yaml", "--quiet"], tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert (tmp_path / "run" / "model.safetensors").exists()
