#!/usr/bin/env bash
# Is hpcfed right on this machine's GPU, and how fast is it there? One command, no internet, eight minutes.
#
#     jobs/bench/gpu.sh [FOLDER OF WHEELS]
#
# What it prints goes into a page, jobs/bench/DATE-GPU.md: the tests on the GPU (methods against the CPU, the same bits on
# 1, 2 and 4 ranks, recorded steps against eager ones), rounds beside a bare loop, hand-written floors, pfl and fedjax,
# and a profile of the workload that is farthest from the fastest. What the time does not suffice for is left out, and
# said. Exit code 1 if a test failed.
#
# DEVICE=cpu tries it without a GPU; LIMIT=480 s in all; WORKLOADS, ROUNDS and TESTS make it smaller; PAGE=file.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
DEVICE=${DEVICE:-cuda} LIMIT=${LIMIT:-480} ROUNDS=${ROUNDS:-12} TESTS=${TESTS:-} PYTHON=${PYTHON:-python3}
WORKLOADS=${WORKLOADS:-pfl-cifar10 cnn mlp logistic lstm resnet18}
PEERS="pfl fedjax jax[cuda12]"
scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT

if [[ -n ${1:-} ]]; then            # into an environment of its own, above that of $PYTHON
    "$PYTHON" -m venv --without-pip "$scratch/venv" || exit 2
    sites='import site; print(*site.getsitepackages(), sep="\n")'
    "$PYTHON" -c "$sites" >"$("$scratch/venv/bin/python" -c "$sites" | head -n 1)/below.pth"
    "$PYTHON" -m pip --python "$scratch/venv/bin/python" install -q --no-index --no-deps --no-compile \
        --ignore-installed "$1"/*.whl || exit 2
    PYTHON=$scratch/venv/bin/python
fi
export PYTHONPATH=$PWD PATH=$(dirname "$(command -v "$PYTHON")"):$PATH
export OMP_NUM_THREADS=1 COLUMNS=150 PYTHONPYCACHEPREFIX=$scratch/bytecode

if ! versions=$("$PYTHON" - <<'PYTHON'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
needed = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
found, missing = {}, []
for name in [re.match(r"[\w.-]+", each)[0] for each in needed] + "mpich scikit-learn pytest pytest-mpi hypothesis".split():
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        missing.append(name)
shown = [f"{name} {found[name]}" for name in ("torch", "numpy", "mpi4py", "mpich") if name in found]
print(" ".join(missing) if missing else ", ".join(shown))
sys.exit(bool(missing))
PYTHON
); then
    echo "hpcfed: this Python lacks: $versions"
    echo "with internet: $PYTHON -m pip download -d wheels $versions (for the peers: $PEERS); here: $0 wheels"
    exit 2
fi
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
[[ $DEVICE == cuda ]] || name="no GPU ($DEVICE)"
page=${PAGE:-jobs/bench/$(date +%F)-$(tr -cs 'a-zA-Z0-9\n' - <<<"${name,,}" | sed 's/-*$//').md}
say() { echo "$@" | tee -a "$page"; }
: >"$page"
say "# $(date +%F), $name"
say
memory=$(nvidia-smi --query-gpu=driver_version,memory.total --format=csv,noheader 2>/dev/null | head -n 1)
say "${memory:+Driver and memory: $memory. }$(lscpu | sed -n 's/^Model name: *//p' | head -n 1)," \
    "$(getconf _NPROCESSORS_ONLN) cores. $versions. By \`jobs/bench/gpu.sh\`."
failed=()

stage() {                           # stage TITLE SECONDS-OF-480 COMMAND...: its output is a section of the page
    local title=$1 most=$((LIMIT * $2 / 480)) left=$((LIMIT - SECONDS - 5)) start=$SECONDS code
    shift 2
    say
    say "## $title"
    say
    ((left >= most)) || most=$left
    if ((most < 10)); then
        say "left out: $LIMIT s were over"
        return
    fi
    say '```'
    timeout -k 5 "$most" "$@" 2>&1 | tee -a "$page"
    code=${PIPESTATUS[0]}
    say '```'
    case $code in
        0) ;;
        124 | 137) say "not done after $most s, its share of $LIMIT" ;;
        *) say "exit code $code" ;;
    esac
    ((code == 0)) || failed+=("$title")
    echo "== $title: $((SECONDS - start)) s"
}

# shellcheck disable=SC2086  # words
stage "Right" 150 "$PYTHON" -m tests.run_suite --device "$DEVICE" --timeout $((LIMIT * 140 / 480)) $TESTS
right=${#failed[@]}
for workload in $WORKLOADS; do
    ranks=(--ranks 1)
    [[ $workload == pfl-* || $workload == cnn ]] && ranks+=(--ranks 2)
    stage "Speed: $workload" 110 "$PYTHON" jobs/bench/peers/compare.py "$workload" --here --device "$DEVICE" --floors \
        --repeats 1 --rounds "$ROUNDS" --warm-up 3 "${ranks[@]}" --go-on --json "$scratch/{workload}.json"
    [[ $workload != pfl-* || $DEVICE != cuda ]] || stage "Speed: $workload in tf32" 50 "$PYTHON" -m hpcfed bench rounds \
        "$workload" --device cuda --precision tf32 --repeats 1 --rounds "$ROUNDS" --warm-up 3
done
read -r ratio worst < <("$PYTHON" - "$scratch"/*.json <<'PYTHON'
import json, sys
from pathlib import Path
found = []
for path in map(Path, sys.argv[1:]):
    if path.is_file():
        rows = next(iter(json.loads(path.read_text())["rounds"].values()))
        times = {row["name"]: row["turns"][0]["wall"] for row in rows}
        found.append((times["hpcfed, 1 rank"] / min(times.values()), path.stem))
ratio, workload = max(found, default=(1.0, ""))
print(f"{ratio:.2f}", workload)
PYTHON
)
[[ -z $worst || $ratio == 1.00 ]] ||
    stage "Profile: $worst, at $ratio of the fastest" 60 "$PYTHON" jobs/bench/profile_round.py "$worst" "$DEVICE"
echo "$SECONDS s; $page${failed:+; failed: ${failed[*]}}"
exit $((right > 0))
