# What the scripts beside it begin with: a folder for the user's files, and an environment in it with `hpcfed` on the path.
#
#   jobs/users/SCRIPT.sh [FOLDER]                    FOLDER: new; default: a temporary one
#   PYTHON=python3.12 jobs/users/SCRIPT.sh           the interpreter; default: python3.11
#   ENVIRONMENT=.venv jobs/users/SCRIPT.sh           an environment that has hpcfed, in place of a new one
set -euo pipefail
clone=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(mkdir -p "${1:-${TMPDIR:-/tmp}/hpcfed-user-$$}" && cd "${1:-${TMPDIR:-/tmp}/hpcfed-user-$$}" && pwd)
export OMP_NUM_THREADS=1

# step TITLE: says how far the user is, and after how many seconds.
step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

# install PYTHON PLACE: a new environment of the locked libraries and hpcfed's wheel.
install() {
  "$1" -m venv "$2"
  "$2/bin/python" -m pip install -qq --no-compile -r "$clone/.ci/lock/torch.txt" -r "$clone/.ci/lock/mpich.txt"
  if ! compgen -G "$folder/wheel/*.whl" > /dev/null; then
    "$2/bin/python" -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir "$folder/wheel" "$clone"
  fi
  "$2/bin/python" -m pip install -qq --no-deps "$folder"/wheel/*.whl
}

# refused PATTERN COMMAND …: the command must end with code 2 and a last line on standard error that has the pattern.
refused() {
  local code=0 line
  line=$("${@:2}" 2>&1 >/dev/null) || code=$?
  line=${line##*$'\n'}
  [[ $code == 2 && $line == *"$1"* ]] || { echo "not refused as expected ($code): $line"; exit 1; }
  echo "$line"
}

cd "$folder"
if [[ ${WHEELS_ONLY:-} != 1 ]]; then
  step "environment"
  environment=${ENVIRONMENT:+$(cd "$OLDPWD" && cd "$ENVIRONMENT" && pwd)}
  [[ -n $environment ]] || { environment=$folder/env; install "${PYTHON:-python3.11}" "$environment"; }
  PATH=$environment/bin:$PATH
fi
