#!/usr/bin/env bash
# The wheel, installed with the lowest and the highest Python that it is for, trains on two ranks to the same bits with both.
# PYTHONS="python3.11 python3.13" names the interpreters; it needs the package index, and half a gigabyte for each.
WHEELS_ONLY=1
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

read -ra pythons <<< "${PYTHONS:-python3.11 python3.13}"
for python in "${pythons[@]}"; do
  name=$(basename "$python")
  step "$name: installation"
  install "$python" "$folder/env-$name"
  mkdir -p "$name"
  (
    cd "$name"
    PATH=$folder/env-$name/bin:$PATH
    step "$name: data, training, a page"
    hpcfed prepare digits --clients 20 --partition dirichlet-client --alpha 0.3 -o digits.h5
    printf 'data: digits.h5\nmodel: {name: mlp, hidden: [64]}\nrounds: 10\ncohort: {size: 5}\n' > fedexp.yaml
    printf 'local: {epochs: 2, batch_size: 10, lr: 0.05}\nalgorithm: {name: fedexp}\n' >> fedexp.yaml
    mpirun -n 2 hpcfed run fedexp.yaml --quiet
    hpcfed report runs/fedexp --output page
  )
done
for python in "${pythons[@]:1}"; do
  cmp "$(basename "${pythons[0]}")/runs/fedexp/model.safetensors" "$(basename "$python")/runs/fedexp/model.safetensors"
done
step "done in $folder: the same model of ${pythons[*]}"
