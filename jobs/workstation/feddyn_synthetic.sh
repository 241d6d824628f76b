#!/usr/bin/env bash
# FedDyn's synthetic sets (its Table 6): FedAvg, FedProx, SCAFFOLD and FedDyn on four sets, each drawn anew for every
# seed, and the rounds they need to the loss that FedAvg has at the paper's round. About half an hour on a core.
# SEEDS="0 1 2" RANKS=2 jobs/workstation/feddyn_synthetic.sh       What is finished is not run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export OMP_NUM_THREADS=1            # ranks and threads together must not outnumber the cores
folder=runs/feddyn-synthetic
sets=(homogeneous models features sizes)    # types 0 to 3
rounds=(150 50 300 150)                     # somewhat more than FedAvg needs in the paper: 136, 20, 274, 79

mkdir -p "$folder"
for seed in ${SEEDS:-0 1 2}; do
    for type in 0 1 2 3; do
        set=${sets[type]}
        data=$folder/$set-$seed.h5
        steps=$(python jobs/workstation/feddyn_inputs.py "$type" "$seed" "$data")
        for method in fedavg fedprox scaffold feddyn; do
            settings=("data=$PWD/$data" "seed=$seed" "rounds=${rounds[type]}" "output=$folder/$set/$method-$seed")
            if [[ $method == scaffold ]]; then
                settings+=("local.steps=$steps")
            fi
            mpirun -n "${RANKS:-2}" hpcfed run --quiet "jobs/recipes/feddyn/synthetic-$method.yaml" "${settings[@]}"
        done
    done
done
python jobs/workstation/tables.py feddyn "$folder"
