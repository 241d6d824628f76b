#!/usr/bin/env bash
# GeL's synthetic set (its Tables 1 and 2): rounds to 85 % of FedAvgCM, FedProx and FedNova without and with guessed
# steps, with the tuned step size and half of it. About a quarter of an hour on a core.
# SEEDS="0 1 2 3 4" RANKS=2 jobs/workstation/gel_synthetic.sh       What is finished is not run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export OMP_NUM_THREADS=1            # ranks and threads together must not outnumber the cores
folder=runs/gel-synthetic
data=$folder/leaf-synthetic.h5
seeds=${SEEDS:-0 1 2 3 4}

mkdir -p "$folder"
if [[ ! -e $data ]]; then
    hpcfed prepare leaf-synthetic -o "$data"
fi
for lr in 0.01 0.005; do
    for run in fedavgcm-{none,remaining,limit} fedprox-{none,remaining} fednova-{none,remaining}; do
        method=${run%-*} guess=${run#*-}
        mpirun -n "${RANKS:-2}" hpcfed run --quiet "jobs/recipes/gel/synthetic-$method.yaml" \
            "seeds=[${seeds// /, }]" "local.lr=$lr" "guess=$guess" "output=$folder/$method-$lr-$guess"
    done
done
python jobs/workstation/tables.py gel "$folder"
