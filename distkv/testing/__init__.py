"""Help for testing what is built on distkv, on any machine.

``distkv.testing.group``: a whole group of ranks in one process, with lost pages, other pool sizes, exceptions and calls
that arrive between begin and end. ``distkv.testing.schedules``: random schedules over such a group.
``distkv.testing.processes``: groups of real processes with a deadline, every rank's traceback, and nothing left behind.
``distkv.testing.warm``: the same, started by forking a process that has imported torch.
"""

from distkv.testing.group import Disagreement, InjectedFault, SimulatedGroup
from distkv.testing.processes import Outcome, RanksFailed, choose_backend, run_outcomes, run_ranks
from distkv.testing.schedules import run_schedule
from distkv.testing.warm import warm_start

__all__ = [
    "Disagreement",
    "InjectedFault",
    "Outcome",
    "RanksFailed",
    "SimulatedGroup",
    "choose_backend",
    "run_outcomes",
    "run_ranks",
    "run_schedule",
    "warm_start",
]
