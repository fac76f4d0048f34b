"""Declarations of keys, and what follows from them."""

from __future__ import annotations

import dataclasses

import pytest

from sweeps.config.keys import KEYS, SECTIONS, is_marked, key_of, scope_of
from sweeps.config.knob import Mark, Scope
from sweeps.paths import CONF
from tests.support.examples import a_plan


def test_every_key_says_what_it_means() -> None:
    assert [key.name for key in KEYS.values() if len(key.declared.help) < 5] == []


def test_every_group_of_conf_is_a_section_or_a_key() -> None:
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert groups - set(SECTIONS) - set(KEYS) == set()


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("micro_batch", Scope.TRIAL),
        ("strategy", Scope.TRIAL),
        ("zero.stage", Scope.TRIAL),
        ("model", Scope.STUDY),
        ("model.layers", Scope.STUDY),
        ("experiment", Scope.STUDY),
        ("cluster.nodes", Scope.STUDY),
        ("cluster.partition", Scope.START),
        ("space", Scope.IDENTITY),
        ("space.zero.stage", Scope.IDENTITY),
        ("study", Scope.IDENTITY),
        ("search.sampler", Scope.SEARCH),
        ("limits.trials", Scope.SEARCH),
        ("limits.retries", Scope.START),
    ],
)
def test_a_key_keeps_its_value_for_a_trial_a_study_or_a_start(name: str, scope: Scope) -> None:
    assert scope_of(name) is scope


def test_what_may_hold_a_password_is_marked() -> None:
    secret = {name for name in KEYS if is_marked(name, Mark.SECRET)}
    assert secret == {
        *("tracking.kind", "tracking.uri", "cluster.setup"),
        *("cluster.srun_args", "cluster.sbatch_args", "cluster.ssh_args"),
    }


def test_trials_in_one_table_share_model_data_and_batch() -> None:
    shared = {name.partition(".")[0] for name in KEYS if is_marked(name, Mark.COMPARABLE)}
    assert shared == {"model", "data", "seq_len", "global_batch", "ranks", "seed"}


def test_a_key_of_deepspeeds_file_has_a_field_of_the_plan() -> None:
    plan = dataclasses.asdict(a_plan())
    for key in KEYS.values():
        if key.deepspeed is not None:
            value = plan
            for part in (key.deepspeed.plan or key.name).split("."):
                value = value[part]


def test_an_override_sets_the_key_before_its_first_equals_sign() -> None:
    assert [key_of(text) for text in ("a.b=c=d", "+space.x=1", "~search", "++seed=1")] == [
        *("a.b", "space.x", "search", "seed")
    ]
