"""ZeRO-3 models built in shards on two real ranks: their values, their memory and their losses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.support.zero_init_ranks import CASES, CPU, MIB, case
from tests.train_entry.conftest import StartRanks
from train_entry.contract import AttemptDir
from train_entry.model.build import build_model

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

RANKS = 2
SLACK = 40 * MIB  # 14 to 17 MiB were seen


@pytest.fixture(scope="module")
def seen(start_ranks: StartRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The observations of each rank."""
    directory = tmp_path_factory.mktemp("zero_init")
    plan, shape = case("gpt2", directory)
    build_model(shape, dataclasses.replace(plan, seed=99), CPU).save_pretrained(directory / "gpt2")
    ranks = start_ranks(AttemptDir(directory), RANKS, "tests.support.zero_init_ranks", str(directory))
    assert ranks.wait() == [0] * RANKS, ranks.logs
    return [json.loads((directory / f"seen.rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_the_shards_together_are_bit_for_bit_the_whole_model(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        assert rank[name]["equal"]
        assert rank[name]["buffers"]


@pytest.mark.parametrize("name", CASES)
def test_the_first_loss_is_that_of_the_whole_model(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        sharded, whole = rank[name]["losses"]
        assert sharded == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_counted_whole_and_held_in_shards(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        sharded, whole = rank[name]["parameters"]
        assert sharded == whole
        assert rank[name]["held"] == 0
        assert rank[name]["shards"] == pytest.approx(whole / RANKS, rel=0.01)


def test_a_rank_never_holds_more_than_its_shard_and_a_parameter(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        big = rank["big"]
        assert big["left"] <= big["peak"] < big["bytes"] / RANKS + SLACK < big["bytes"]
