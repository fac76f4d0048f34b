"""We understand what Slurm prints, and ask it rarely."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sweeps.cluster.slurm.queries import (
    JobWatch,
    SlurmError,
    SlurmSilence,
    ask,
    clean_environment,
    parse_gres,
    parse_sacct,
    parse_seconds,
    parse_sinfo,
    parse_squeue,
    said,
)

RUNNING = "7|RUNNING|None|1:30|30:00|x/0001/1|/studies/x|y\n"
FAILED = "7|FAILED|NonZeroExitCode|1:30|30:00|x/0001/1|/studies\n"


@dataclass
class Scheduler:
    """A scripted squeue and sacct, and a clock."""

    squeue: str = ""
    sacct: str | None = ""  # None: sacct refuses
    refusal: str = "Slurm accounting storage is disabled"
    down: bool = False
    time_s: float = 0.0
    asked: list[str] = field(default_factory=list)

    def ask(self, *command: str) -> str:
        self.asked.append(command[0])
        if self.down:
            raise SlurmError("Unable to contact slurm controller")
        if command[0] == "squeue":
            return self.squeue
        if self.sacct is None:
            raise SlurmError(self.refusal)
        return self.sacct

    def watch(self) -> JobWatch:
        return JobWatch(ask=self.ask, now=lambda: self.time_s)


def state(watch: JobWatch, job_id: str = "7") -> str | None:
    found = watch.facts(job_id)
    return found.state if found else None


def test_a_comment_may_hold_what_separates() -> None:
    job = parse_squeue(RUNNING)["7"]
    assert (job.state, job.name, job.comment) == ("RUNNING", "x/0001/1", "/studies/x|y")
    assert (job.used_s, job.limit_s) == (90, 1800)


def test_a_comment_of_several_lines_hides_no_job() -> None:
    text = f"6|RUNNING|None|1:30|30:00|theirs|a note\nof two lines\n\n{RUNNING}"
    assert set(parse_squeue(text)) == {"6", "7"}


def test_a_step_out_of_memory_is_told_apart_from_its_job() -> None:
    text = "7|FAILED|1:0|00:01:00|00:30:00\n7.batch|FAILED|1:0|00:01:00|\n7.0|OUT_OF_MEMORY|0:125|00:01:00|\n"
    found = parse_sacct(text)["7"]
    assert (found.state, found.ran_out_of_memory) == ("FAILED", True)
    assert parse_sacct("8|CANCELLED by 0|0:0|00:00:00|UNLIMITED\n")["8"].state == "CANCELLED"


def test_nodes_are_read_with_their_gpus_and_features() -> None:
    large = "n1|64|512000+|gpu:h100:8(S:0-1)|ib,hbm3|mix|gpu*|2-00:00:00"
    small = "n2|8|16000|(null)|(null)|down*|cpu|infinite"
    first, second = parse_sinfo(f"{large}\n{small}\n")
    assert (first.cores, first.memory_bytes, first.gpus) == (64, 512000 * 2**20, {"h100": 8})
    assert (first.features, first.partition, first.is_default) == (frozenset(("ib", "hbm3")), "gpu", True)
    assert (first.longest_min, first.is_up) == (2880, True)
    assert (second.gpu_count, second.longest_min, second.is_up) == (0, None, False)


@pytest.mark.parametrize("state", ["down*", "drain", "drng", "drng@", "futr", "maint", "inval"])
def test_nodes_that_take_no_job(state: str) -> None:
    assert not parse_sinfo(f"n1|8|16000|(null)|(null)|{state}|main*|infinite\n")[0].is_up


@pytest.mark.parametrize(
    ("text", "gpus"),
    [("gpu:4", {"": 4}), ("gpu:a100:2,gpu:v100:1,nvme:3", {"a100": 2, "v100": 1}), ("(null)", {})],
)
def test_gpus_by_type(text: str, gpus: dict[str, int]) -> None:
    assert parse_gres(text) == gpus


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784), ("10:00", 600), ("1:00:00", 3600), ("UNLIMITED", None), ("INVALID", None)],
)
def test_times(text: str, seconds: int | None) -> None:
    assert parse_seconds(text) == seconds


def test_complaints_become_one_line() -> None:
    text = "sbatch: error: invalid partition: nix\nallocation failure: Invalid partition\n"
    assert said(text) == "invalid partition: nix; allocation failure: Invalid partition"


def test_a_command_that_cannot_be_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmSilence) as missing:
        ask("sinfo")
    (tmp_path / "sinfo").touch(mode=0o644)
    with pytest.raises(SlurmSilence) as forbidden:
        ask("sinfo")
    line = "sinfo cannot be run here ({}); start this on a host with Slurm"
    assert str(missing.value) == line.format("No such file or directory")
    assert str(forbidden.value) == line.format("Permission denied")


def test_a_surrounding_jobs_variables_are_left_behind() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_CONF": "/etc/s", "SBATCH_QOS": "q", "RANK": "0", "HOME": "/h"}
    assert clean_environment(environ) == {"SLURM_CONF": "/etc/s", "HOME": "/h", "SLURM_TIME_FORMAT": "%s"}


def test_any_number_of_questions_is_one_query() -> None:
    slurm = Scheduler(squeue=RUNNING)
    watch = slurm.watch()
    assert {state(watch) for _ in range(100)} == {"RUNNING"}
    assert slurm.asked == ["squeue"]


def test_queries_stay_under_one_a_second_whatever_happens() -> None:
    slurm = Scheduler()
    watch = slurm.watch()
    for turn in range(500):
        slurm.time_s = turn * 0.2
        _ = [watch.facts(str(job)) for job in range(20)]
    assert len(slurm.asked) < slurm.time_s


def test_a_job_that_left_the_queue_is_looked_up() -> None:
    slurm = Scheduler(squeue=RUNNING, sacct="7|NODE_FAIL|0:0|00:01:00|00:30:00\n")
    watch = slurm.watch()
    assert state(watch) == "RUNNING"
    slurm.squeue, slurm.time_s = "", 10.0
    assert state(watch) == "NODE_FAIL"


def test_without_accounting_it_is_gone_after_a_while() -> None:
    slurm = Scheduler(sacct=None)
    watch = slurm.watch()
    assert state(watch) is None
    slurm.time_s = 50.0
    assert state(watch) is None
    slurm.time_s = 70.0
    assert state(watch) == "GONE"
    assert slurm.asked.count("sacct") == 1


def test_an_accounting_that_is_down_is_waited_for_but_not_for_ever() -> None:
    slurm = Scheduler(sacct=None, refusal="Connection refused")
    watch = slurm.watch()
    assert state(watch) is None
    slurm.time_s = 100.0
    assert state(watch) is None
    slurm.sacct, slurm.time_s = "7|NODE_FAIL|0:0|00:01:00|00:30:00\n", 110.0
    assert state(watch) == "NODE_FAIL"
    slurm.sacct = None
    assert state(watch, "8") is None
    slurm.time_s = 800.0
    assert state(watch, "8") == "GONE"


def test_nothing_is_concluded_while_the_controller_is_away() -> None:
    slurm = Scheduler(squeue=RUNNING)
    watch = slurm.watch()
    assert state(watch) == "RUNNING"
    slurm.down, slurm.time_s = True, 1000.0
    assert state(watch) == "RUNNING"
    assert state(watch, "8") is None
    slurm.down, slurm.time_s = False, 1010.0
    assert state(watch) == "RUNNING"


def test_of_a_failed_job_the_accounting_may_know_more() -> None:
    slurm = Scheduler(
        squeue=FAILED, sacct="7|FAILED|1:0|00:01:00|00:30:00\n7.0|OUT_OF_MEMORY|0:125|00:01:00|\n"
    )
    found = slurm.watch().final("7")
    assert found is not None and found.ran_out_of_memory
    slurm = Scheduler(squeue=FAILED, sacct=None)
    watch = slurm.watch()
    assert watch.final("7") is None
    found = watch.final("7")
    assert found is not None and found.state == "FAILED"


def test_a_job_is_found_by_its_name_and_directory() -> None:
    watch = Scheduler(squeue=RUNNING).watch()
    found = watch.named("x/0001/1", "/studies/x|y")
    assert found is not None and found.job_id == "7"
    assert watch.named("x/0001/1", "/another/x") is None
