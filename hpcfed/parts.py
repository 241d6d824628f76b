"""The parts of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfed.arithmetic.operations import Arithmetic
from hpcfed.client.engine_choice import EngineChoice
from hpcfed.client.private_parts import PrivateParts
from hpcfed.client.solver import Engine, SequentialSolver, Stepping
from hpcfed.client.state_store import ClientStates
from hpcfed.cohort import Cohorts
from hpcfed.data.cache import Samples
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.models.flat import FlatModel
from hpcfed.ranks.devices import WorldDevices
from hpcfed.ranks.placement import Placement
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from hpcfed.reduce.masks import Masks
from hpcfed.types import Method, State
from hpcfed.updates._chain import Chain
from hpcfed.updates._samples import SampleMechanism


@dataclass(frozen=True)
class Parts:
    """The parts of a run, as `hpcfed.assembly` builds them from a recipe on every rank."""

    method: Method
    chain: Chain
    """What happens to an update on its way; its client side is in `method`."""
    federation: Federation
    model: FlatModel
    initial_w: Tensor
    """The model before round 1, (d,) on the device; never changed."""
    engine: Engine
    engine_choice: EngineChoice
    stepping: Stepping
    tuner: SequentialSolver | None
    """Takes the steps of ``evaluate.clients.fine_tune``."""
    shards: Shards
    cohorts: Cohorts
    placement: Placement
    clients: ClientStates
    """States of clients that have taken part: of those at home here, or trained here last."""
    private: PrivateParts
    """Their private parts among them."""
    evaluate_model: str
    skips_bad: bool
    """Whether a round goes on without a client whose training failed, instead of ending the run."""
    watchdog: Watchdog
    reduction: str
    """Kind of the round's sums, ``exact`` or ``fast``."""
    hashes_updates: bool
    """Whether the hash of each client's update travels with it."""
    masks: Masks | None
    """Of secure aggregation."""
    sentinel: str
    """``on``, ``off`` or ``strict``."""
    repeats_bits: bool
    """Whether a client that is trained twice has the same bits; false with a GPU's kernels of any order."""
    sum_on_device: Callable[[Tensor], None] | None
    """What sums the device's memory over ranks; None where MPI sums a copy on the host."""
    server_home: torch.device
    """Where the server's vectors lie, and the sums of a round: the host, or every rank's GPU."""
    devices: WorldDevices
    """Of all ranks."""
    step_work: int | None
    """Multiply-adds by which ``device: auto`` was decided; None where it was not asked for, or no rank sees a GPU."""
    seed: int
    """The recipe's ``seed.batches``, of the methods' random streams too."""
    loss_of: Callable[[int, Tensor, Samples, State], float]
    """f_i of a client, a model, (d,), all of a client's samples, and its private part."""
    arithmetic: Arithmetic
    """Of the recipe's ``bits``."""
    world: World
    sample_noise: SampleMechanism | None = None
    """What hides clients' samples, where ``local.noise`` does."""

    @property
    def trains_personal(self) -> bool:
        """Whether each client trains a personal model beside the common one."""
        return getattr(self.method.local, "trains_personal", False)

    @property
    def mpi_is_free(self) -> bool:
        """Whether other threads may call MPI in a round: not where it sums a device's memory."""
        return self.sum_on_device != self.world.sum_in_place
