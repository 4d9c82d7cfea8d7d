#!/usr/bin/env bash
# Starts distkv's quickstart under torchrun, one process per rank, on this host or on several.
#
#   bash launch/torchrun.sh CONFIG [--messages FILE]
#   bash launch/torchrun.sh --module distkv.engine.verify CONFIG     # or any module of yours, which every rank runs
#
# On two hosts, with four ranks in the configuration, two processes on each (the same checkout, configuration and
# model on both; host 0 is the one that MASTER_ADDR names):
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29400 bash launch/torchrun.sh CONFIG     # on 10.0.0.1
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29400 bash launch/torchrun.sh CONFIG     # on the other
#
# Uses the checkout's .venv if there is one, else the python3 on PATH. --help lists arguments and variables.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/_front.sh
source "$root/launch/_front.sh"

# exec: signals reach torchrun itself, which ends all ranks, and its exit code is this script's.
exec "$python" "$root/launch/torchrun.py" "$@"
