#!/usr/bin/env bash
# Starts distkv's quickstart under torchrun, one process per rank.
#
#   bash launch/torchrun.sh CONFIG [--messages FILE]
#
# Uses the checkout's .venv if there is one, else the python3 on PATH. See launch/torchrun.py for the variables.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$root/.venv/bin/python"
if [[ ! -x "$python" ]]; then
    python=$(command -v python3) || { echo "launch: neither $root/.venv (make run makes it) nor python3 on PATH" >&2; exit 2; }
fi

# Read when torch is imported, so they come first. A spinning OpenMP thread would take the core from another rank.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

# exec: signals reach torchrun itself, which ends all ranks, and its exit code is this script's.
exec "$python" "$root/launch/torchrun.py" "$@"
