"""Every mistake gives status 2 and one line with place, fault and way out, and launches nothing."""

from __future__ import annotations

import pytest

from tests.conftest import CommandLine

MISTAKES = {
    "an unknown knob": (["zero.stge=1"], "zero.stage"),
    "an unknown knob, swept": (["-m", "zero.stge=1,2"], "zero.stage"),
    "an unknown knob with a plus": (["+zero.stge=1"], "zero.stage"),
    "an unknown knob with a plus, in a study": (["-m", "+zero.stge=1"], "zero.stage"),
    "a bad value among good swept ones": (["-m", "precision=bf16,fp8"], "auto, fp32, bf16, fp16"),
    "a study-level key swept": (["-m", "measure.steps=5,9"], "fixed within a study"),
    "how a study is run swept": (["-m", "limits.trials=1,2"], "the next start of the study may change"),
    "an unknown choice": (
        ["strategy=zero9"],
        "ddp, hybrid_3d, pp2, pp_zero1, tp2, tp_zero1, zero0, zero1, zero2, zero2_offload, zero3, "
        "zero3_nvme, zero3_offload",
    ),
    "an unknown choice, swept": (
        ["-m", "strategy=zero1,zero9"],
        "ddp, hybrid_3d, pp2, pp_zero1, tp2, tp_zero1, zero0, zero1, zero2, zero2_offload, zero3, "
        "zero3_nvme, zero3_offload",
    ),
    "an unknown space": (
        ["-m", "space=[zero,bucket]"],
        "buckets, full, model_parallel, none, nvme, offload, quickstart, zero",
    ),
    "a value out of range": (["micro_batch=0"], "at least 1"),
    "a value out of range, in a study": (["-m", "micro_batch=0"], "at least 1"),
    "a value of another type": (["seq_len=long"], "Integer"),
    "a batch that does not divide": (["micro_batch=3"], "micro_batch may be 1, 2, 4 or 8"),
    "a knob without effect": (
        ["-m", "strategy=ddp,zero1", "zero.prefetch_bucket_size=1e6,1e7"],
        "it has an effect only with zero.stage=3",
    ),
    "a bucket that does nothing": (["-m", "zero.allgather_bucket_size=1e6,1e7"], "changes nothing"),
    "offload without a stage": (["strategy=zero0", "zero.offload_optimizer=cpu"], "may be 1, 2 or 3"),
    "a schedule without an end": (["lr.schedule=cosine"], "lr.total_steps"),
    "a batch that never divides": (["-m", "micro_batch=3"], "micro_batch may be 1, 2, 4 or 8"),
    "a text that does not exist": (["data=text", "data.path=/no/such/text"], "does not exist"),
    "more ranks than capacity": (["ranks=9"], "ranks may be 1 to 2"),
    "more ranks than capacity, in a study": (["-m", "ranks=9"], "ranks may be 1 to 2"),
    "a study name with a slash": (["study=a/b"], "letters, digits"),
    "a tracking URI of no kind": (["tracking.uri=nonsense://x"], "tracking=none"),
    "a tracking URI that cannot be opened": (["-m", "tracking.uri=sqlite:////no/x.db"], "tracking=none"),
    "a model that is not there": (["model=hf", "model.path=/no/such/model"], "no config.json"),
    "an interval for a grid": (["-m", "search=grid", "lr.base=interval(0.1,0.2)"], "finite space"),
    "ranks that vary without an objective": (["-m", "ranks=1,2"], "tokens_per_s_per_gpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(command_line: CommandLine, mistake: str) -> None:
    assert_refused(command_line, *MISTAKES[mistake])


@pytest.mark.slow
@pytest.mark.libaio  # without it there are two mistakes
def test_a_disk_that_is_not_named_is_one_line_and_status_2(command_line: CommandLine) -> None:
    assert_refused(command_line, ["strategy=zero3_nvme"], "cluster.nvme_path=DIR")


def assert_refused(command_line: CommandLine, arguments: list[str], way_out: str) -> None:
    done = command_line.run(*arguments, "cluster.gpus_per_node=2", "cluster.device=cpu")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert way_out in done.stderr
    assert not list(command_line.directory.glob("studies/*/trials"))


@pytest.mark.slow
def test_all_mistakes_are_reported_at_once(command_line: CommandLine) -> None:
    done = command_line.run("-m", "micro_batch=0,1", "precision=bf16,fp8", "strategy=zero1,zero9")
    assert done.returncode == 2
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "micro_batch",
        "precision",
        "strategy=zero9",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rule: [sqrt\n", "line 2"),
        ("rule: sqrt\nbaes: 3\n", "did you mean lr.base"),
        ("rule: cubic\n", "sqrt, linear, none (conf/lr/mine.yaml)"),
    ],
)
def test_a_broken_yaml_is_named_with_its_file(checkout: CommandLine, text: str, expected: str) -> None:
    (checkout.directory / "conf" / "lr" / "mine.yaml").write_text(text)
    done = checkout.run("lr=mine")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "lr/mine" in done.stderr
    assert expected in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--info", "defaults"]])
def test_hydras_own_flags_keep_working(command_line: CommandLine, arguments: list[str]) -> None:
    done = command_line.run(*arguments)
    assert done.returncode == 0
    assert "strategy" in done.stdout or "micro_batch" in done.stdout
    assert list(command_line.directory.iterdir()) == []
