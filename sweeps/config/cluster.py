"""The keys of `cluster`: where trials run, and what is asked of a scheduler. Part of the schema."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config.knob import Mark, Scope, knob


@dataclass
class ClusterConfig:
    kind: str = knob("local", "where trials run", choices=("local", "slurm", "hostfile"))
    device: str = knob("auto", "auto: GPUs if there are any, else CPU", choices=("auto", "cpu", "cuda"))
    nodes: int = knob(1, "machines that the trials of a study share", low=1, marks=Mark.BESIDE_PLANS)
    gpus_per_node: int | None = knob(None, "ranks per node; null: all GPUs, or all cores on a CPU", low=1)
    parallel: int | None = knob(None, "most trials at once; null: one per node", low=1, scope=Scope.START)
    on_interrupt: str = knob(
        "cancel", "what Ctrl-C does to running trials", choices=("cancel", "leave"), scope=Scope.START
    )
    nvme_path: str | None = knob(None, "a directory on a fast local disk, for offload to NVMe")
    memory_limit_gib: float | None = knob(
        None, "GPU memory that a rank may use; null: all of it", unit="GiB", above=0, marks=Mark.FIT_ONLY
    )
    price_per_gpu_hour: float | None = knob(
        None, "price in any currency, for limits.cost and objective=cost", above=0, scope=Scope.SEARCH
    )
    limit_counts_context: bool = knob(
        True, "memory_limit_gib includes CUDA's context, as a smaller GPU's memory would", marks=Mark.FIT_ONLY
    )
    # Several nodes.
    ports: str = knob(
        "30000-32767",
        "ports for the rendezvous of ranks on several nodes: the first node opens one of them",
        scope=Scope.START,
    )
    interface: str | None = knob(
        None,
        "network interface between nodes; null: the one of each node's name, and NCCL's own choice",
        scope=Scope.START,
    )
    # Slurm.
    partition: str | None = knob(None, "Slurm: partition; null: the cluster's default", scope=Scope.START)
    account: str | None = knob(None, "Slurm: account to charge", scope=Scope.START)
    qos: str | None = knob(None, "Slurm: quality of service", scope=Scope.START)
    time_min: int | None = knob(
        None,
        "Slurm: time limit of a job; null: limits.startup_s plus ten times the estimated time",
        unit="minutes",
        low=1,
        scope=Scope.START,
    )
    memory_gib: float | None = knob(
        None,
        "Slurm: host memory that a job requests per node; null: by the estimate; 0: all",
        unit="GiB",
        low=0,
        scope=Scope.START,
    )
    cpus_per_rank: int | None = knob(
        None, "Slurm: cores per rank; null: a node's cores divided by its ranks", low=1
    )
    gpu_type: str | None = knob(None, "Slurm: its name for the GPU type, such as h100")
    constraint: str | None = knob(None, "Slurm: features that nodes must have")
    exclude: str | None = knob(None, "Slurm: nodes to leave out", scope=Scope.START)
    exclusive: bool = knob(True, "Slurm: allow no other job on a trial's nodes")
    setup: list[str] = knob(
        [],
        "Slurm: shell lines to run before the ranks start, such as `module load cuda`",
        scope=Scope.START,
        marks=Mark.SECRET,
    )
    srun_args: list[str] = knob(
        [],
        "Slurm: more arguments for srun, such as --container-image=IMAGE",
        scope=Scope.START,
        marks=Mark.SECRET,
    )
    sbatch_args: list[str] = knob(
        [],
        "Slurm: more arguments for sbatch, such as --reservation=NAME",
        scope=Scope.START,
        marks=Mark.SECRET,
    )
    hold: bool = knob(
        False,
        "Slurm: hold nodes and run all trials on them, instead of a job for each trial",
        scope=Scope.START,
    )
    holds: int = knob(
        1, "Slurm, with hold: number of allocations that share cluster.nodes", low=1, scope=Scope.START
    )
    hold_min: int | None = knob(
        None,
        "Slurm, with hold: time limit of an allocation; null: 8 hours",
        unit="minutes",
        low=2,
        scope=Scope.START,
    )
    hold_idle_s: float = knob(
        300,
        "Slurm, with hold: an idle allocation ends after this time",
        unit="seconds",
        low=1,
        scope=Scope.START,
    )
    # A hostfile.
    hostfile: str = knob(
        "/job/hostfile", "hostfile: its path; lines HOST slots=N, in DeepSpeed's format", scope=Scope.START
    )
    ssh_port: int | None = knob(
        None, "hostfile: port of ssh; null: from ssh's configuration", low=1, high=65535, scope=Scope.START
    )
    ssh_args: list[str] = knob(
        [], "hostfile: more arguments for ssh, such as -i~/.ssh/cluster", scope=Scope.START, marks=Mark.SECRET
    )
