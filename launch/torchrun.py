"""torchrun with what distkv needs around it; started by ``torchrun.sh``.

Checks arguments, configuration and environment once, and then has :mod:`distkv.launching` start one process per rank
and end all of them when one fails or when this process is interrupted. The exit code is that of the first rank that
failed (torchrun's is always 1); 2 if arguments, configuration or environment cannot be used, or if the hosts do not
meet; 130 after Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import _front as front


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; returns the exit code."""
    # From the first moment on: it stays pending until take_interrupts, which needs the package.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    problem = front.use_this_checkout()
    if problem:
        return front.fail(problem)
    from distkv import launching

    launching.take_interrupts()
    given = front.parse("torchrun.sh", "Start one process per rank, on this host or on several.",
                        launching.VARIABLES, arguments)  # fmt: skip
    return given if isinstance(given, int) else front.explained(lambda: _start(given))


def _start(given: front.Given) -> int:
    from distkv import launching

    config = front.load_config(given)
    hosts = launching.Hosts.from_environment(config.parallel.ranks)
    if given.is_ours:
        hosts.check_number(config.parallel.ranks)
        front.check(config, given, hosts.processes)
    return launching.start(given.module, given.of_module, hosts, explained=(2,) if given.is_ours else ())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
