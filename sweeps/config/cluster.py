"""The keys of `cluster`: where trials run, and how a scheduler is asked. Part of the schema."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config.knob import Mark, Scope, knob


@dataclass
class ClusterConfig:
    kind: str = knob("local", "where trials run", choices=("local", "slurm", "hostfile"))
    device: str = knob("auto", "auto: GPUs where there are any", choices=("auto", "cpu", "cuda"))
    nodes: int = knob(1, "machines", low=1, marks=Mark.BESIDE_PLANS)
    gpus_per_node: int | None = knob(None, "ranks a node holds; null: all GPUs, or all cores on CPU", low=1)
    parallel: int | None = knob(None, "most trials at once; null: one a node", low=1, scope=Scope.START)
    on_interrupt: str = knob(
        "cancel", "Ctrl-C: running trials", choices=("cancel", "leave"), scope=Scope.START
    )
    nvme_path: str | None = knob(None, "a directory on a fast local disk, for offload to NVMe")
    memory_limit_gib: float | None = knob(
        None, "memory of a GPU that a rank may use; null: all of it", unit="GiB", above=0, marks=Mark.FIT_ONLY
    )
    price_per_gpu_hour: float | None = knob(
        None, "for limits.cost and objective=cost, in any currency", above=0, scope=Scope.SEARCH
    )
    limit_counts_context: bool = knob(
        True, "memory_limit_gib includes CUDA's context, as a smaller card's would", marks=Mark.FIT_ONLY
    )
    # Several nodes.
    ports: str = knob(
        "30000-32767",
        "where ranks on several nodes meet: one of these ports of the first node",
        scope=Scope.START,
    )
    interface: str | None = knob(
        None,
        "network interface between nodes; null: as each node's name resolves, and as NCCL chooses",
        scope=Scope.START,
    )
    # Slurm.
    partition: str | None = knob(None, "Slurm: partition; null: the cluster's default", scope=Scope.START)
    account: str | None = knob(None, "Slurm: account that is charged", scope=Scope.START)
    qos: str | None = knob(None, "Slurm: quality of service", scope=Scope.START)
    time_min: int | None = knob(
        None,
        "Slurm: time limit of a job; null: start-up's limit and what the estimate expects",
        unit="minutes",
        low=1,
        scope=Scope.START,
    )
    memory_gib: float | None = knob(
        None,
        "Slurm: host memory of a node that a job asks for; null: by the estimate; 0: all",
        unit="GiB",
        low=0,
        scope=Scope.START,
    )
    cpus_per_rank: int | None = knob(
        None, "Slurm: cores of a rank; null: a node's cores shared by its ranks", low=1
    )
    gpu_type: str | None = knob(None, "Slurm: the GPUs' name in its configuration, such as h100")
    constraint: str | None = knob(None, "Slurm: features that nodes must have")
    exclude: str | None = knob(None, "Slurm: nodes to leave out", scope=Scope.START)
    exclusive: bool = knob(True, "Slurm: no other job on a trial's nodes")
    setup: list[str] = knob(
        [],
        "Slurm: shell lines before the ranks start, such as `module load cuda`",
        scope=Scope.START,
        marks=Mark.SECRET,
    )
    srun_args: list[str] = knob(
        [],
        "Slurm: more arguments of srun, such as --container-image=IMAGE",
        scope=Scope.START,
        marks=Mark.SECRET,
    )
    sbatch_args: list[str] = knob(
        [],
        "Slurm: more arguments of sbatch, such as --reservation=NAME",
        scope=Scope.START,
        marks=Mark.SECRET,
    )
    hold: bool = knob(
        False,
        "Slurm: run trials one after another in nodes that are held, not a job for each",
        scope=Scope.START,
    )
    holds: int = knob(1, "Slurm, with hold: allocations that share cluster.nodes", low=1, scope=Scope.START)
    hold_min: int | None = knob(
        None,
        "Slurm, with hold: time limit of an allocation; null: 8 hours",
        unit="minutes",
        low=2,
        scope=Scope.START,
    )
    hold_idle_s: float = knob(
        300,
        "Slurm, with hold: an allocation in which nothing runs ends after this time",
        unit="seconds",
        low=1,
        scope=Scope.START,
    )
    # A hostfile.
    hostfile: str = knob(
        "/job/hostfile", "hostfile: its path; lines HOST slots=N, as DeepSpeed reads them", scope=Scope.START
    )
    ssh_port: int | None = knob(
        None, "hostfile: port of ssh; null: as ssh is configured", low=1, high=65535, scope=Scope.START
    )
    ssh_args: list[str] = knob(
        [], "hostfile: more arguments of ssh, such as -i~/.ssh/cluster", scope=Scope.START, marks=Mark.SECRET
    )
