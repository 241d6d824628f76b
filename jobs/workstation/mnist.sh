#!/usr/bin/env bash
# MNIST over 100 clients, Dirichlet 0.3: FedAvg, FedExP and FedDyn, 60 rounds, 3 seeds, and their comparison.
# Usage: jobs/workstation/mnist.sh FOLDER-WITH-THE-FOUR-IDX-FILES        (RANKS=2 by default; minutes on two cores)
set -euo pipefail
raw=$(realpath "${1:?the folder with the four MNIST files}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export OMP_NUM_THREADS=1            # ranks and threads together must not outnumber the cores
folder=runs/mnist
data=$folder/mnist-dir0.3-100.h5

mkdir -p "$folder"
if [[ ! -e $data ]]; then
    hpcfed prepare mnist --raw "$raw" --clients 100 --partition dirichlet-client --alpha 0.3 -o "$data"
fi
for method in fedavg fedexp feddyn; do
    for seed in 0 1 2; do
        mpirun -n "${RANKS:-2}" hpcfed run "jobs/recipes/mnist/$method.yaml" "seed=$seed" "output=$folder/$method-$seed"
    done
done
hpcfed report "$folder"/{fedavg,fedexp,feddyn}-{0,1,2} --target 0.96 --output "$folder/report"
