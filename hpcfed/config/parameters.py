"""The recipe's section ``parameters``: which parts of the model are private to clients, frozen, or averaged."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from hpcfed.config.limits import Count, Section, a_tuple

Pattern = Annotated[str, Field(min_length=1)]
"""A name of the module's with ``*``, ``?`` and ``[…]`` as in file names; ``*`` matches dots, too."""
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(a_tuple)]


class Parameters(Section):
    """Roles of the module's parameters and buffers, by patterns of their names.

    `private` ones are a state of each client, neither sent nor averaged (FedBN, FedPer); `frozen` ones keep their
    initial values. With `private_first` a round begins with steps of the private parameters alone, and goes on with
    steps of the shared ones alone (FedRep). `buffers` is the role of all buffers that neither names: ``averaged`` with
    the method's weights, ``private``, or ``fixed`` at their initial values, which normalisation layers then use in
    training, too.

    References: Li et al., "FedBN", ICLR 2021; Arivazhagan et al., "Federated learning with personalization layers",
    2019; Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021,
    Algorithm 1; Andreux et al., "Siloed federated learning for multi-centric histopathology datasets", 2020 (SiloBN).
    """

    later: ClassVar[frozenset[str]] = frozenset({"private_first"})

    private: Patterns = ()
    """Each client's own, neither sent nor averaged: `["head.*"]`; FedBN: `["*bn*"]`."""
    private_first: Count | None = None
    """So many of a client's first steps (epochs, with `local.epochs`) train the private parameters alone, all others
    the shared ones alone: FedRep."""
    frozen: Patterns = ()
    """Kept at their initial values: `["features.*"]`."""
    buffers: Literal["averaged", "private", "fixed"] | None = None
    """Role of the other buffers, such as BatchNorm's running statistics: `averaged`, `private` or `fixed`."""

    @model_validator(mode="after")
    def _private_ones_are_named(self) -> Parameters:
        if self.private_first is not None and not self.private:
            raise ValueError("'private' beside 'private_first'")
        return self

    @property
    def keeps_private(self) -> bool:
        """Whether clients have a private part."""
        return bool(self.private) or self.buffers == "private"

    @property
    def given(self) -> str:
        """The keys that are set, as a remark names them; "" if none is."""
        return ", ".join(key for key in ("private", "frozen", "buffers") if getattr(self, key))
