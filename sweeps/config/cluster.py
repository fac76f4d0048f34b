"""The keys of `cluster`: where trials run, and how a scheduler is asked. Part of the schema."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config.knob import knob


@dataclass
class ClusterConfig:
    kind: str = knob("local", "where trials run", choices=("local", "slurm", "hostfile"))
    device: str = knob("auto", "auto: GPUs where there are any", choices=("auto", "cpu", "cuda"))
    nodes: int = knob(1, "machines", low=1)
    gpus_per_node: int | None = knob(None, "ranks a node holds; null: all GPUs, or all cores on CPU", low=1)
    parallel: int | None = knob(None, "most trials at once; null: one a node", low=1)
    on_interrupt: str = knob("cancel", "Ctrl-C: running trials", choices=("cancel", "leave"))
    nvme_path: str | None = knob(None, "a directory on a fast local disk, for offload to NVMe")
    memory_limit_gib: float | None = knob(
        None, "memory of a GPU that a rank may use; null: all of it", unit="GiB", above=0
    )
    price_per_gpu_hour: float | None = knob(
        None, "for limits.cost and objective=cost, in any currency", above=0
    )
    limit_counts_context: bool = knob(
        True, "memory_limit_gib includes CUDA's context, as a smaller card's would"
    )
    # Several nodes.
    ports: str = knob(
        "30000-32767", "where ranks on several nodes meet: one of these ports of the first node"
    )
    interface: str | None = knob(
        None, "network interface between nodes; null: as each node's name resolves, and as NCCL chooses"
    )
    # Slurm.
    partition: str | None = knob(None, "Slurm: partition; null: the cluster's default")
    account: str | None = knob(None, "Slurm: account that is charged")
    qos: str | None = knob(None, "Slurm: quality of service")
    time_min: int | None = knob(
        None,
        "Slurm: time limit of a job; null: start-up's limit and what the estimate expects",
        unit="minutes",
        low=1,
    )
    memory_gib: float | None = knob(
        None,
        "Slurm: host memory of a node that a job asks for; null: by the estimate; 0: all",
        unit="GiB",
        low=0,
    )
    cpus_per_rank: int | None = knob(
        None, "Slurm: cores of a rank; null: a node's cores shared by its ranks", low=1
    )
    gpu_type: str | None = knob(None, "Slurm: the GPUs' name in its configuration, such as h100")
    constraint: str | None = knob(None, "Slurm: features that nodes must have")
    exclude: str | None = knob(None, "Slurm: nodes to leave out")
    exclusive: bool = knob(True, "Slurm: no other job on a trial's nodes")
    setup: list[str] = knob([], "Slurm: shell lines before the ranks start, such as `module load cuda`")
    srun_args: list[str] = knob([], "Slurm: more arguments of srun, such as --container-image=IMAGE")
    sbatch_args: list[str] = knob([], "Slurm: more arguments of sbatch, such as --reservation=NAME")
    hold: bool = knob(False, "Slurm: run trials one after another in nodes that are held, not a job for each")
    holds: int = knob(1, "Slurm, with hold: allocations that share cluster.nodes", low=1)
    hold_min: int | None = knob(
        None, "Slurm, with hold: time limit of an allocation; null: 8 hours", unit="minutes", low=2
    )
    hold_idle_s: float = knob(
        300,
        "Slurm, with hold: an allocation in which nothing runs ends after this time",
        unit="seconds",
        low=1,
    )
    # A hostfile.
    hostfile: str = knob("/job/hostfile", "hostfile: its path; lines HOST slots=N, as DeepSpeed reads them")
    ssh_port: int | None = knob(None, "hostfile: port of ssh; null: as ssh is configured", low=1, high=65535)
    ssh_args: list[str] = knob([], "hostfile: more arguments of ssh, such as -i~/.ssh/cluster")
