#!/usr/bin/env bash
# Check and time a collective of NCCL, RCCL or gloo with torch.matmul; see -h.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'TEXT'
Usage: run.sh [-n NUM] [-c COLLECTIVE] [-h] [-- OPTIONS]

Check a collective with torch.matmul on fresh random data, and time it: what the fused op is measured by.

  -n NUM         ranks (default: all GPUs if there are two or more, else 4 on the CPU)
  -c COLLECTIVE  all_gather, all_reduce or reduce_scatter (default: all three)
  -h, --help     show this
  OPTIONS        go to the program; try: run.sh -c all_reduce -- --help

COLLECTIVE.json takes the result, in the current directory; with -c, OPTIONS may name another --output_file.
PYTHON is the interpreter (default: the first with PyTorch of python, .venv/bin/python of this checkout, python3).

  run.sh -n 8 -c all_reduce -- -m 8192 -n 8192 -k 29568 --datatype bf16
TEXT
}

fail() {
    echo "run.sh: $1; see run.sh -h" >&2
    exit 2
}

ranks=()
collectives=(all_gather all_reduce reduce_scatter)
if [[ ${1:-} == --help ]]; then
    usage
    exit 0
fi
while getopts ":n:c:h" option; do
    case $option in
        n)
            [[ $OPTARG =~ ^[1-9][0-9]*$ ]] || fail "-n: '$OPTARG' is not a positive number"
            ranks=(--num_ranks "$OPTARG")
            ;;
        c)
            [[ $OPTARG =~ ^(all_gather|all_reduce|reduce_scatter)$ ]] || fail "-c: '$OPTARG' is not a collective"
            collectives=("$OPTARG")
            ;;
        h)
            usage
            exit 0
            ;;
        :) fail "-$OPTARG needs a value" ;;
        *) fail "there is no option -$OPTARG" ;;
    esac
done
shift $((OPTIND - 1))

interpreter() {
    local one
    for one in python "$here/../../../.venv/bin/python" python3; do
        if "$one" -c 'from importlib.util import find_spec as f; exit(not f("torch"))' 2>/dev/null; then
            echo "$one"
            return
        fi
    done
    fail "no Python with PyTorch here: make setup, or set PYTHON"
}

for given in "$@"; do
    if [[ ${#collectives[@]} -gt 1 && ${given%%=*} == --output_file ]]; then
        fail "--output_file: one file for ${#collectives[@]} collectives; choose one of these by -c"
    fi
done
python=${PYTHON:-$(interpreter)}
for collective in "${collectives[@]}"; do
    "$python" "$here/$collective.py" --validate --benchmark --output_file "$collective.json" \
        "${ranks[@]}" "$@"
done
