"""What FedDyn's synthetic experiment starts from, and `hpcfed prepare` does not make.

    python feddyn_inputs.py TYPE DRAW FILE

writes into FILE what ``hpcfed prepare feddyn-synthetic --type TYPE --seed DRAW`` does, with all clients' training data
as the test set: the paper measures the loss on the pooled training data, and a run's ``train_loss`` is the unweighted
mean over clients, another number where their sizes differ. Beside it goes ``zeros.safetensors``, the initial model.
Files that exist are left as they are. Prints SCAFFOLD's number of local steps, 10 · ⌈n̄/10⌉ for n̄ samples a client.

Reference: Acar et al., FedDyn, ICLR 2021, appendix A.1.1; example_synthetic.py of its code.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from data_prep.synthetic import feddyn
from data_prep.write import write
from hpcfed.files import write_whole

NUM_CLIENTS, DIMENSION, CLASSES = 20, 30, 5
EPOCHS, BATCH_SIZE = 10, 10


def main(kind: int, draw: int, path: Path) -> None:
    """Write the two files where they are missing, and print the number of steps."""
    dataset = feddyn.generate(draw, type=kind, clients=NUM_CLIENTS, dimension=DIMENSION, classes=CLASSES)
    if dataset.owner is not None and not path.exists():
        pooled = replace(dataset, test_x=dataset.x, test_y=dataset.y)
        natural = {"scheme": "natural", "clients": NUM_CLIENTS}
        write(path, pooled, dataset.owner, NUM_CLIENTS, partition=natural, name=path.stem)
    zeros = path.with_name("zeros.safetensors")
    if not zeros.exists():
        weight, bias = np.zeros((CLASSES, DIMENSION), np.float32), np.zeros(CLASSES, np.float32)
        write_whole(zeros, save({"weight": weight, "bias": bias}))
    print(EPOCHS * math.ceil(len(dataset.x) / NUM_CLIENTS / BATCH_SIZE))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
