#!/usr/bin/env bash
# Starts distkv's quickstart under mpirun, one process per rank: MPICH's, Open MPI's, MVAPICH's or Intel's.
#
#   bash launch/mpirun.sh CONFIG [--messages FILE]
#   bash launch/mpirun.sh --module distkv.engine.verify CONFIG     # or any module of yours, which every rank runs
#   bash launch/mpirun.sh --hostfile hosts -- CONFIG               # options of mpirun before --
#
# MPI tells each process its rank, and where rank 0 listens; no port is given. As many processes as the configuration
# has ranks, unless mpirun's options say -n or -np. Needs mpi4py and an MPI library (pip install mpi4py mpich).
# Uses the checkout's .venv if there is one, else the python3 on PATH; --help lists arguments and variables.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/_front.sh
source "$root/launch/_front.sh"

exec "$python" "$root/launch/mpirun.py" "$@"
