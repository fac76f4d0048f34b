from __future__ import annotations

import pytest
import torch

from train_entry.measure.memory import meter_for
from train_entry.rank import LaunchError, RankInfo, process_age_s, set_segments

ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def test_a_rank_reads_its_place_from_the_environment() -> None:
    where = RankInfo.from_env(ENVIRONMENT, planned_ranks=4)
    assert where == RankInfo(rank=3, ranks=4, local_rank=1, init_method="env://")


def test_a_rendezvous_that_is_given_is_used() -> None:
    environment = {**ENVIRONMENT, "SHARDSWEEP_RENDEZVOUS": "file:///x"}
    assert RankInfo.from_env(environment, planned_ranks=4).init_method == "file:///x"


def test_a_plan_of_one_rank_needs_no_launcher() -> None:
    assert RankInfo.from_env({}, planned_ranks=1).ranks == 1


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_wrong_launch_is_told_the_right_one(environment: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="torchrun --nproc-per-node 4"):
        RankInfo.from_env(environment, planned_ranks=4)


def test_the_process_has_lived_for_some_seconds() -> None:
    assert 0 < process_age_s() < 24 * 3600


def test_a_peak_in_host_memory_is_seen_in_its_phase() -> None:
    meter = meter_for(torch.device("cpu"))
    idle_bytes = meter.take().allocated_bytes
    torch.ones(25_000_000)  # 100 MB, freed at once
    assert meter.take().allocated_bytes > idle_bytes + 50_000_000


@pytest.mark.parametrize(
    ("torch_version", "before", "after"),
    [
        ("2.13.0", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("2.7.0a0+nv25", {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            "2.9.1+cu128",
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
        (
            "2.8.0",
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
    ],
)
def test_expandable_segments_join_what_the_user_asks_of_the_allocator(
    torch_version: str, before: dict[str, str], after: dict[str, str]
) -> None:
    environ = dict(before)
    set_segments(environ, torch_version, expandable=True)
    assert environ == after


def test_off_overrules_what_the_user_asks_of_the_allocator() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    set_segments(environ, "2.13.0", expandable=False)
    assert environ["PYTORCH_ALLOC_CONF"].endswith(",expandable_segments:False")


def test_off_is_left_to_torch_where_nobody_asks() -> None:
    environ: dict[str, str] = {}
    set_segments(environ, "2.13.0", expandable=False)
    assert environ == {}
