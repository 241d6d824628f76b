"""The references of a run: BibTeX for exactly the methods, data and models that its recipe names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hpcfed import algorithms, updates
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.report.group import method_name
from hpcfed.lab.report.read import RECIPE, read_json, read_recipe

FEDEXP, FEDDYN, GEL = "jhunjhunwala2023fedexp", "acar2021federated", "boukhari2025boosting"
FEDAVG, FEDPROX = "mcmahan2017communication", "li2020federated"
ADAPTIVE, LEAF = "reddi2021adaptive", "caldas2018leaf"
NIID_BENCH = "li2022federated"
PRIVATE_PARTS, SILOBN = ("li2021fedbn", "arivazhagan2019personalization"), "andreux2020siloed"
FEDREP, SECURE, DP_SGD = "collins2021exploiting", "bonawitz2017practical", "abadi2016deep"
OF_AN_OPTION = {"andrew2021differentially": "quantile", "karimireddy2019error": "feedback"}
"""Papers of parts of the lists → the parameter without which a run does not use them."""
OPTIMIZERS = {"adam": "kingma2015adam", "yogi": "zaheer2018adaptive"}
MODELS = {
    "emnist-cnn": (ADAPTIVE,),
    "cifar-cnn": (FEDEXP,),
    "feddyn-cnn": (FEDDYN,),
    "femnist-cnn": (GEL,),
    "niid-cnn": (NIID_BENCH,),
    "resnet18-gn": ("he2016deep", "hsieh2020noniid"),
    "lstm": (FEDDYN,),
}
PARTITIONS = {
    "dirichlet-client": ("hsu2019measuring",),
    "dirichlet-class": ("yurochkin2019bayesian",),
    "shards": (FEDAVG,),
    "classes": (NIID_BENCH,),
    "quantity": (NIID_BENCH,),
    "iid-per-class": (FEDDYN,),
}
DATA = {
    "mnist": ("lecun1998gradient",),
    "fashion-mnist": ("xiao2017fashion",),
    "emnist": ("cohen2017emnist",),
    "flamby-heart-disease": ("terrail2022flamby", "janosi1988heart"),
    "flamby-tcga-brca": ("terrail2022flamby",),
    "flamby-isic2019": ("terrail2022flamby", "tschandl2018ham10000", "codella2018skin", "combalia2019bcn20000"),
    "flamby-camelyon16": ("terrail2022flamby", "litjens2018camelyon"),
    "cifar10": ("krizhevsky2009learning",),
    "cifar100": ("krizhevsky2009learning",),
    "cinic10": ("darlow2018cinic",),
    "femnist": (LEAF, "cohen2017emnist"),
    "shakespeare": (FEDAVG, LEAF),
    "fed-emnist": (LEAF, "cohen2017emnist"),
    "fed-cifar100": (ADAPTIVE, "krizhevsky2009learning"),
    "fed-shakespeare": (FEDAVG, LEAF),
    "digits": ("alpaydin1998optical",),
    "magic": ("bock2004methods",),
    "linear-regression": (FEDEXP,),
    "toy2d": (FEDEXP,),
    "fcube": (NIID_BENCH,),
    "feddyn-synthetic": (FEDDYN,),
    "fedprox-synthetic": (FEDPROX,),
    "leaf-synthetic": (LEAF,),
}
"""Name of the data set in the federation file → references; names like ``emnist-letters`` count as ``emnist``."""

Reason = tuple[str, tuple[str, ...]]
"""An item that the run used, in words, and the BibTeX keys of its references; no keys if none is known."""


def bibtex(run: Path) -> str:
    """Return a run's references as BibTeX, each below a comment that names the items for which it is cited.

    Raises:
        InputError: `run` is not a run folder.
    """
    if not (run / RECIPE).is_file():
        raise InputError("not a run folder", where=str(run), remedy="name the output folder of a run")
    recipe = read_recipe(run / RECIPE)
    purposes: dict[str, list[str]] = {}
    unknown = []
    for words, keys in (*of_recipe(recipe), *of_data(recipe)):
        for key in keys:
            purposes.setdefault(key, []).append(words)
        if not keys:
            unknown.append(words)
    entries = references()
    parts = [f"% {words}: no reference known here" for words in unknown]
    parts += [f"% {'; '.join(words)}\n{entries[key]}" for key, words in purposes.items()]
    return "\n\n".join([*parts, f"% The program\n{_ourselves(read_json(run / 'environment.json'))}"])


def of_recipe(recipe: Mapping[str, Any]) -> Iterator[Reason]:
    """Yield what a recipe names, with its references: method, updates, privacy, optimizer, evaluation and model."""
    algorithm, local = recipe.get("algorithm") or {}, recipe.get("local") or {}
    name = method_name({"algorithm": algorithm})
    parts = [str(algorithm[role]) for role in ("local", "normalize", "server") if algorithm.get(role)]
    if algorithm.get("factory"):
        yield f"Method {algorithm['factory']}", ()
    elif algorithm.get("name"):
        yield f"Method {name}", algorithms.references().get(str(algorithm["name"]), ())
    else:
        known = algorithms.references_of_parts()
        yield f"Method {name}", tuple(dict.fromkeys(key for part in parts for key in known.get(part, (FEDAVG,))))
    if (recipe.get("guess") or "none") != "none":
        yield f"Guessed updates, GeL ({recipe['guess']})", (GEL,)
    for place, part in ((key, part) for key in updates.LISTS for part in recipe.get(key) or ()):
        named, parameters = next(iter(part.items()))
        papers = updates.references().get(named, ())
        used = tuple(key for key in papers if key not in OF_AN_OPTION or (parameters or {}).get(OF_AN_OPTION[key]))
        yield f"Part of {place} {part.get('factory') or named}", used
    if recipe.get("secure_aggregation"):
        yield "Secure aggregation", (SECURE,)
    if local.get("noise"):
        yield "Noise on samples, DP-SGD", (DP_SGD,)
    if local.get("step"):
        yield f"Local step {local['step']}", ()
    if (optimizer := local.get("optimizer")) in OPTIMIZERS:
        yield f"Clients' optimizer {optimizer}", (OPTIMIZERS[optimizer],)
    if (recipe.get("evaluate") or {}).get("model") == "last-two":
        yield "Evaluation of the mean of the last two iterates", (FEDEXP,)
    parameters = recipe.get("parameters") or {}
    if parameters.get("private"):
        yield "Private parameters", PRIVATE_PARTS
    if parameters.get("private_first"):
        yield "Private parameters trained first, FedRep", (FEDREP,)
    if parameters.get("buffers") == "private":
        yield "Private running statistics", (SILOBN,)
    model = recipe.get("model") or {}
    if model.get("name") in MODELS:
        yield f"Model {model['name']}", MODELS[model["name"]]
    elif model.get("factory"):
        yield f"Model {model['factory']}", ()


def of_data(recipe: Mapping[str, Any]) -> Iterator[Reason]:
    """Yield the data set and its partition, from the federation file; if it is missing, one item that says so."""
    try:
        with Federation.open(Path(str(recipe.get("data")))) as federation:
            name, scheme = federation.name, federation.partition.get("scheme")
    except InputError:
        yield f"Data and partition of {recipe.get('data')}, which is not there", ()
        return
    yield f"Data set {name}", DATA.get("emnist" if name.startswith("emnist-") else name, ())
    if scheme in PARTITIONS:
        yield f"Partition {scheme}", PARTITIONS[scheme]


def references() -> dict[str, str]:
    """Return the package's bibliography: BibTeX key → whole entry."""
    text = files(__name__).joinpath("references.bib").read_text(encoding="utf-8")
    return {match[1]: match[0] for match in re.finditer(r"^@\w+\{([^,]+),\n.*?^\}", text, re.MULTILINE | re.DOTALL)}


def _ourselves(environment: Mapping[str, Any]) -> str:
    """Return the BibTeX entry of hpcfed, with the version and year of the run."""
    version, started = environment.get("hpcfed"), str(environment.get("started", ""))
    fields = {
        "title": "{hpcfed}: Federated Learning on {HPC} Clusters",
        "author": "{The hpcfed developers}",
        **({"version": version} if version else {}),
        **({"year": started[:4]} if started[:4].isdecimal() else {}),
    }
    lines = ",\n".join(f"  {key:8}= {{{value}}}" for key, value in fields.items())
    return f"@software{{hpcfed,\n{lines}\n}}"
