"""Find out by a job what a compute node has, since a login node has other GPUs, or none.

The report lies beside the studies, one for each kind of node and set of versions, and is reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sweeps.cluster.node.devices import find_gpus, host_with
from sweeps.cluster.node.operators import copy_ops, cpu_signature
from sweeps.cluster.slots import Layout
from sweeps.cluster.slurm.check import Survey
from sweeps.cluster.slurm.queries import JobWatch
from sweeps.cluster.slurm.request import Site, memory, submitit_parameters
from sweeps.cluster.slurm.states import remedy
from sweeps.cluster.slurm.submit import Executor, cancel_jobs
from sweeps.config.schema import ClusterConfig
from sweeps.errors import ConfigError, SweepError
from sweeps.machine import Machine
from train_entry.contract import ContractError, dump, load, read_document, write_atomic

FOLDER = ".cluster"  # in the directory of studies; no study's name begins with a dot
COMPILING_MIN = 60  # to compile DeepSpeed's operators for a new kind of CPU
LOOK_S = 0.5
FILES_S = 10.0
VERSIONED = ("torch", "deepspeed", "nvidia-ml-py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A job's report on its node, where it had one GPU."""

    host: str
    machine: Machine
    ops: str  # the directory of DeepSpeed's compiled operators
    cpu: str  # the signature of the CPU that they were compiled for
    problem: str = ""  # why nothing can train there
    doubt: str = ""  # what some trials will lack there


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """The order to the job."""

    answer: str
    device: str
    nvme_path: str | None
    ops: str  # the directory of the operators that are already compiled, for the CPU with the signature `cpu`
    cpu: str
    ops_elsewhere: str  # the directory for all other operators


def report_path(studies_dir: Path, cluster: ClusterConfig, survey: Survey) -> Path:
    """The report's file: one for each kind of node and set of versions."""
    kind = [survey.device, survey.nodes[0].partition, cluster.constraint, cluster.gpu_type, cluster.nvme_path]
    kind += [f"{name}={metadata.version(name)}" for name in VERSIONED] + [
        sys.prefix,
        *cluster.setup,
        *cluster.srun_args,  # they may name another container
    ]
    digest = hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:10]
    return studies_dir.absolute() / FOLDER / f"{survey.nodes[0].partition}-{digest}.json"


def known_report(path: Path) -> Probe | None:
    try:
        return read_document(path, Probe)
    except ContractError:  # written by another version of this program
        return None


def ask_a_node(path: Path, site: Site, survey: Survey) -> Probe:
    """Submit the question, wait for the answer and keep it. Raises ConfigError if nothing can train there."""
    folder = Path(tempfile.mkdtemp(prefix=f"{path.stem}-", dir=_made(path.parent)))
    answer = folder / "answer.json"
    question = _Question(
        answer=str(answer),
        device=survey.device,
        nvme_path=site.cluster.nvme_path,
        ops=str(Path(sys.prefix) / "torch_extensions"),
        cpu=cpu_signature(),
        ops_elsewhere=str(path.with_suffix(".ops")),
    )
    executor = Executor(folder)
    executor.update_parameters(
        **{
            **submitit_parameters(
                site, Layout(ranks=1, nodes=1), f"shardsweep/probe/{path.stem}", str(folder)
            ),
            "exclusive": None,
        },
        **_asks(site),
    )
    job_id = executor.send(answer_on_node, dump(question))
    print(f"probing a node of {survey.nodes[0].partition} once (job {job_id})", flush=True)
    _wait(job_id, answer)
    found = known_report(answer)
    if found is None:
        raise SweepError(f"job {job_id} did not write {answer}; its log is in the same folder")
    if found.problem:
        raise ConfigError(f"cluster=slurm, node {found.host}: {found.problem}")
    if found.doubt:
        print(f"node {found.host}: {found.doubt}; see {folder}; remove {path} to try again", flush=True)
    write_atomic(path, dump(found))
    return found


def _asks(site: Site) -> dict[str, Any]:
    """Time and memory to request: no more than for a trial, since a site may refuse more."""
    limits = (COMPILING_MIN, site.longest_min, site.cluster.time_min)
    asked: dict[str, Any] = {"time": min(limit for limit in limits if limit)}
    if site.cluster.memory_gib is not None:
        asked["mem"] = memory(site, Layout(ranks=1, nodes=1), None)
    return asked


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _wait(job_id: str, answer: Path) -> None:
    """Wait for the answer. Raises SweepError if the job ends without one."""
    watch, told, over_at = JobWatch(), "", None
    try:
        while not answer.exists():
            facts = watch.facts(job_id)
            if facts is not None and facts.is_waiting and facts.reason not in (told, "None"):
                told = facts.reason
                helps = remedy(told)
                print(f"job {job_id} waits: {told}{f'; {helps}' if helps else ''}", flush=True)
            if facts is not None and facts.is_over:
                over_at = over_at or time.monotonic()
            if facts is not None and over_at is not None and time.monotonic() - over_at > FILES_S:
                raise SweepError(f"job {job_id} ended ({facts.state}) without an answer in {answer.parent}")
            time.sleep(LOOK_S)
            os.listdir(answer.parent)  # makes NFS look again
    except KeyboardInterrupt:
        for problem in cancel_jobs([job_id], watch):
            print(problem, file=sys.stderr)
        raise


# ---------------------------------------------------------------- on the node


def answer_on_node(question: str) -> None:
    """Run as the job: look around, compile what is not compiled for this CPU, and write the answer."""
    asked = load(_Question, question)
    problem, gpus = "", find_gpus() if asked.device == "cuda" else ()
    if asked.device == "cuda" and not gpus:
        problem = "NVML shows no GPU to a job that asked for one"
    elif gpus:
        problem = _torch_problem()
    ops, doubt, fits = asked.ops, "", cpu_signature() == asked.cpu
    if not problem and not (fits and not _missing(Path(ops), bool(gpus))):
        known, ops = Path(ops) if fits else None, asked.ops_elsewhere
        _compile(known, Path(ops), bool(gpus))
        if missing := _missing(Path(ops), bool(gpus)):
            doubt = f"could not compile {', '.join(missing)}; trials that need it try again on each node"
    found = Probe(
        host=socket.gethostname(),
        machine=host_with(gpus, asked.nvme_path),
        ops=ops,
        cpu=cpu_signature(),
        problem=problem,
        doubt=doubt,
    )
    write_atomic(Path(asked.answer), dump(found))


def _torch_problem() -> str:
    """The reason why torch cannot use the node's GPUs; empty if it can."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "train_entry.install.torch_check"], capture_output=True, text=True
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def _missing(directory: Path, with_gpus: bool) -> list[str]:
    """Operators that could be compiled on this node but are not."""
    asked = _ops(directory, with_gpus, "--missing")
    asked.check_returncode()
    return asked.stdout.split()


def _compile(known: Path | None, to: Path, with_gpus: bool) -> None:
    """Compile operators in a local directory, then copy them whole: other nodes may be reading from `to`."""
    with tempfile.TemporaryDirectory(prefix="shardsweep-ops-") as folder:
        if known is not None:
            copy_ops(known, Path(folder))
        print(_ops(Path(folder), with_gpus).stdout)  # to the job's log
        copy_ops(Path(folder), _made(to))


def _ops(directory: Path, with_gpus: bool, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "train_entry.install.operators",
        *(["--gpus"] if with_gpus else []),
        *more,
    ]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(directory)}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
