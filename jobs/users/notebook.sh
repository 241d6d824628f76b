#!/usr/bin/env bash
# A notebook with data, model, loss, method, metric and observer of its own; its run is verified afterwards in another folder.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

step "the notebook, in a kernel of its own"
mkdir -p notebook elsewhere
cp "$clone/jobs/users/own.ipynb" notebook/
jupyter execute --timeout=300 notebook/own.ipynb --output=done

step "verified elsewhere, without the notebook"
mv notebook/runs/own elsewhere/
rm -r notebook
(
  cd elsewhere
  hpcfed verify own --run-code
  hpcfed replay own --round 3 --client 1 --run-code
  hpcfed export own --run-code -o card
)

step "done in $folder"
