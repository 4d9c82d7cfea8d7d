# Sourced by the scripts beside it, which set `root` to the checkout: sets `python`, and what torch reads when imported.
# shellcheck shell=bash
# shellcheck disable=SC2154  # root is the caller's
python="$root/.venv/bin/python"
if [[ ! -x "$python" ]]; then
    python=$(command -v python3) || { echo "launch: neither $root/.venv (make run makes it) nor python3 on PATH" >&2; exit 2; }
fi

# Read when torch is imported, so they come first. A spinning OpenMP thread would take the core from another rank.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
