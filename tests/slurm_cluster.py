"""A stand-in for a Slurm cluster: ``srun`` and ``scontrol`` that start tasks here, with the variables that Slurm sets.

Only the cluster is played; the batch script, the layout and the meeting are the real ones. What a node would be is a
name: all tasks run on this machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SRUN = """\
#!{python}
import os, subprocess, sys
nodes, text = {nodes!r}, {text!r}
options, command = [], sys.argv[1:]
while command[0].startswith("-"):
    options.append(command.pop(0))
print("srun", *options, file=sys.stderr, flush=True)
tasks = int(next(option for option in options if option.startswith("--ntasks=")).partition("=")[2])
step = 0
while True:
    try:
        os.mkdir(os.path.join({folder!r}, "step%d" % step))
        break
    except FileExistsError:
        step += 1
each = -(-tasks // len(nodes))
on = [min(each, tasks - node * each) for node in range(len(nodes))]
started = []
for task in range(tasks):
    node, local = divmod(task, each)
    started.append(subprocess.Popen(command, env={{
        **os.environ, "SLURM_STEP_ID": str(step), "SLURM_STEPID": str(step), "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(len(nodes)), "SLURM_STEP_NODELIST": text,
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, on)), "SLURMD_NODENAME": nodes[node],
    }}))
codes = [process.wait() for process in started]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""

SCONTROL = """\
#!/bin/sh
[ "$1 $2 $3" = "show job {job}" ] || exit 1
echo "JobId={job} JobName=distkv"
echo "   Command={script} CONFIG"
echo "   WorkDir=/"
"""


class Cluster:
    """The programs in ``folder``, for a job on ``nodes``, which Slurm writes as ``text``; the first is this machine."""

    def __init__(self, folder: Path, nodes: list[str], text: str, script: Path, job: int) -> None:
        self.folder, self.nodes, self.text, self.job = folder, nodes, text, job
        folder.mkdir()
        srun = SRUN.format(python=sys.executable, nodes=nodes, text=text, folder=str(folder))
        for name, content in (("srun", srun), ("scontrol", SCONTROL.format(job=job, script=script))):
            (folder / name).write_text(content)
            (folder / name).chmod(0o755)

    def in_batch(self, tasks: int, cpus: int = 1) -> dict[str, str]:
        """What a batch script of the job finds in its environment."""
        return {
            "PATH": os.pathsep.join([str(self.folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SLURM_JOB_ID": str(self.job), "SLURM_JOB_NODELIST": self.text, "SLURM_NTASKS": str(tasks),
            "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": self.nodes[0],
            "SLURM_CPUS_PER_TASK": str(cpus), "SLURM_SUBMIT_DIR": "/",
        }  # fmt: skip
