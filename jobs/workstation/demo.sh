#!/usr/bin/env bash
# The main job in small: images of digits, 20 clients, four methods on 2 ranks, one comparison. About a minute.
# Runs again in seconds: what is finished says so. RANKS=4 jobs/workstation/demo.sh uses more ranks, with the same result.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export OMP_NUM_THREADS=1            # ranks and threads together must not outnumber the cores
folder=runs/demo
methods=(fedavg fedprox fedexp feddyn)

mkdir -p "$folder"
if [[ ! -e $folder/digits.h5 ]]; then
    hpcfed prepare digits --clients 20 --partition dirichlet-client --alpha 0.3 -o "$folder/digits.h5"
fi
for method in "${methods[@]}"; do
    mpirun -n "${RANKS:-2}" hpcfed run "jobs/recipes/demo/$method.yaml" "output=$folder/$method"
done
hpcfed report "${methods[@]/#/$folder/}" --output "$folder/report"

echo "The comparison: $folder/report/report.html, with its pictures in $folder/report/figures"
