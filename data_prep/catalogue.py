"""Catalogue of data sets by the name a user types: the reader or generator, and the origin of the files.

To add one, write its file in ``sources`` or ``synthetic`` and name it in `SOURCES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from data_prep.dataset import Dataset
from data_prep.sources import cifar, cinic, digits, emnist, federation, flamby, idx, leaf_json, own, text, tff
from data_prep.sources.files import Origin
from data_prep.synthetic import feddyn, fedprox, leaf, linear_regression, toy2d


@dataclass(frozen=True)
class Source:
    """An entry of the catalogue.

    Attributes:
        load: reader or generator. Its parameters are among `raw`, the folder of the source's files; `seed`; and
            keyword-only options.
        origin: title, and the published files.
        seed: default seed.
    """

    load: Callable[..., Dataset]
    origin: Origin = field(default_factory=lambda: Origin(""))
    seed: int = 0

    def takes(self, what: str) -> bool:
        """Tell whether `load` has a parameter of that name."""
        return what in inspect.signature(self.load).parameters


def _idx(family: idx.Family) -> Source:
    return Source(lambda raw: idx.load(raw, family), family.origin)


def _emnist(split: str) -> Source:
    return Source(lambda raw: emnist.load(raw, split), emnist.family(split).origin)


SOURCES = {
    "mnist": _idx(idx.MNIST),
    "fashion-mnist": _idx(idx.FASHION_MNIST),
    "emnist-letters": Source(emnist.load_letters, emnist.family("letters").origin),
    **{f"emnist-{split}": _emnist(split) for split in emnist.SPLITS if split != "letters"},
    "cifar10": Source(cifar.load10, cifar.CIFAR10.origin),
    "cifar100": Source(cifar.load100, cifar.CIFAR100.origin),
    "cinic10": Source(cinic.load, cinic.ORIGIN),
    "femnist": Source(leaf_json.load_femnist, leaf_json.FEMNIST),
    "leaf-shakespeare": Source(leaf_json.load_shakespeare, leaf_json.SHAKESPEARE),
    "leaf-vectors": Source(leaf_json.load_vectors, leaf_json.VECTORS),
    "shakespeare": Source(text.load, text.ORIGIN),
    "fed-emnist": Source(tff.load_emnist, tff.EMNIST.origin),
    "fed-cifar100": Source(tff.load_cifar100, tff.CIFAR100.origin),
    "fed-shakespeare": Source(tff.load_shakespeare, tff.SHAKESPEARE.origin),
    "flamby-heart-disease": Source(flamby.load_heart, flamby.HEART),
    "flamby-tcga-brca": Source(flamby.load_tcga, flamby.TCGA),
    "digits": Source(digits.load, Origin("Handwritten digits, 8 × 8, that come with scikit-learn")),
    "linear-regression": Source(linear_regression.generate, Origin("FedExP's linear regression, made from the seed")),
    "toy2d": Source(toy2d.generate, Origin("FedExP's toy of two clients in the plane")),
    feddyn.NAME: Source(feddyn.generate, Origin("FedDyn's synthetic classification, made from the seed")),
    fedprox.NAME: Source(fedprox.generate, Origin("FedProx's synthetic(α, β), made from the seed")),
    leaf.NAME: Source(leaf.generate, Origin("LEAF's synthetic classification, made from the seed"), seed=leaf.SEED),
    "own": Source(
        own.load,
        Origin(
            "Your own data: npz, npy, CSV or Parquet, a file per client; a table of all; folders of images",
            layout="a file or a folder per client; or one table, with --client COLUMN or --partition; files test.*",
        ),
    ),
    "federation": Source(
        federation.load,
        Origin("A federation file, to partition it anew", layout="nothing else: name the file itself"),
    ),
}


def listing() -> Iterator[str]:
    """Yield the lines of ``hpcfed prepare --list``: each source's files, with sizes and checksums."""
    for name, source in SOURCES.items():
        origin = source.origin
        yield f"{name:<18} {origin.title}"
        indented = partial("{:<18} {}".format, "")
        if origin.url:
            yield indented(f"from {origin.url}")
        if origin.layout:
            yield indented(f"--raw: {origin.layout}")
        for file in origin.files:
            yield indented(f"  {file.name}: {file.facts()}{f'; {file.unpack}' if file.unpack else ''}")
        yield ""
    yield "Nothing is downloaded: put the files into a folder yourself, and name it by --raw."
