"""Help for testing what is built on distkv: groups of real processes, see ``distkv.testing.processes``."""
