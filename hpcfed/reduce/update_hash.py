"""The hash of a client's update: 64 bits by which two machines, or two runs, compare what a client sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from torch import Tensor


def hash_of_update(vectors: Mapping[str, Tensor], names: Sequence[str], scalars: Sequence[float] = ()) -> int:
    """Return XXH3-64 of the reported vectors, (d,) each, in the order of `names`, and of the scalars, in theirs.

    A GPU's vectors are copied to the host for it.
    """
    digest = xxhash.xxh3_64()
    for name in names:
        digest.update(vectors[name].detach().cpu().contiguous().numpy().data)
    digest.update(np.array(scalars, dtype="<f8").tobytes())
    return digest.intdigest()
