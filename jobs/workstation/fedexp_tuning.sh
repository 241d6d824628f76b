#!/usr/bin/env bash
# FedExP's synthetic linear regression, tuned as in its appendix D.3: the grids of η_g and η_l, 50 rounds, the smallest
# training loss over the last 10 (the paper's rule; a regression has no accuracy), beside the synthetic row of Table 3.
# DRAWS="0 1 2" RANKS=2 jobs/workstation/fedexp_tuning.sh      A quarter of an hour on a core for each draw of the data.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export OMP_NUM_THREADS=1            # ranks and threads together must not outnumber the cores
folder=runs/fedexp-tuning
declare -A server=(                 # grids of η_g; the paper's first one names 10^0.5 twice: 10^1.5 is taken for the other
    [fedavg]="algorithm.server_lr=10**0:10**2:5"
    [scaffold]="algorithm.server_lr=10**0:10**2:5"
    [fedadagrad]="algorithm.server_lr=10**-1:10**1:5"
)

mkdir -p "$folder"
if [[ ! -e $folder/zeros.safetensors ]]; then
    python -c "import numpy, safetensors.numpy as s; s.save_file({'weight': numpy.zeros((1, 1000))}, '$folder/zeros.safetensors')"
fi
for draw in ${DRAWS:-0}; do
    data=$folder/draw-$draw.h5
    [[ -e $data ]] || hpcfed prepare linear-regression --seed "$draw" -o "$data"
    for method in fedexp fedavg scaffold fedadagrad; do
        grids=(--grid "local.lr=10**-2:10**0:5")
        [[ $method == fedexp ]] || grids+=(--grid "${server[$method]}")
        mpirun -n "${RANKS:-2}" hpcfed sweep "jobs/recipes/fedexp/synthetic-$method.yaml" "data=$PWD/$data" \
            "${grids[@]}" --select train_loss:last10 --output "$folder/$method-$draw"
    done
done
python jobs/workstation/tables.py fedexp "$folder"
