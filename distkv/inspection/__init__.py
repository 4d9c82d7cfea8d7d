"""What a configuration means and what a machine offers, before anything is started.

``distkv check-config``, ``distkv plan`` and ``distkv doctor``. Nothing here starts a process group, loads weights or
is imported by the rest of the package.
"""
