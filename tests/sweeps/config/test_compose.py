"""Composing one typed configuration from overrides, and tracing a bad value to its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sweeps.config.compose import Composer
from sweeps.errors import ConfigError
from sweeps.space.dimensions import Choices
from sweeps.space.grammar import read_request
from train_entry.contract import Scalar


@pytest.fixture
def own_conf(tmp_path: Path) -> Path:
    """A valid conf/ with two groups of one file each."""
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("# @package _global_\nzero: {stage: 1}\n")
    (tmp_path / "lr").mkdir()
    (tmp_path / "lr" / "fast.yaml").write_text("base: 1e-3\n")
    (tmp_path / "sweep.yaml").write_text(
        "defaults: [schema, lr: fast, _self_, strategy: mine]\nseq_len: 64\n"
    )
    return tmp_path


@pytest.fixture
def finite_points(composer: Composer) -> list[dict[str, Scalar]]:
    """Points that together contain every finite value of every file of conf/space, groups first."""
    spaces = ",".join(composer.options("space"))
    texts = composer.with_fixed([f"space=[{spaces}]"]).space().items()
    dimensions = read_request([f"{key}={text}" for key, text in texts], composer).space.dimensions
    values = {d.key: d.range.values for d in dimensions if isinstance(d.range, Choices)}
    keys = sorted(values, key=lambda key: key not in composer.groups())
    rows = range(max(map(len, values.values())))
    return [{key: values[key][row % len(values[key])] for key in keys} for row in rows]


def override(key: str, value: Scalar) -> str:
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def problems(composer: Composer, values: dict[str, Scalar] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        composer.compose(values)
    return caught.value.problems


def test_setting_knobs_agrees_with_composing_them_as_overrides(
    composer: Composer, finite_points: list[dict[str, Scalar]]
) -> None:
    assert len(finite_points[0]) >= 15
    for point in finite_points:
        overrides = [override(key, value) for key, value in point.items()]
        assert composer.compose(point) == composer.with_fixed(overrides).compose()


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("optimizer.betas", "[0.8, 0.9]", "optimizer.betas=[0.8,0.9]"),
        ("zero.reduce_bucket_size", 50_000_000, "zero.reduce_bucket_size=5e7"),
        ("ranks", None, "ranks=null"),
        ("lr.warmup", "samples", "lr.warmup=samples"),
        ("lr.base", 1, "lr.base=1"),
    ],
)
def test_other_values_agree_with_their_overrides_too(
    composer: Composer, key: str, value: Scalar, written: str
) -> None:
    assert composer.compose({key: value}) == composer.with_fixed([written]).compose()


def test_a_knob_that_varies_is_set_after_the_preset_that_varies(composer: Composer) -> None:
    config = composer.compose({"zero.overlap_comm": False, "strategy": "zero3"})
    assert (config.zero.stage, config.zero.overlap_comm) == (3, False)


def test_a_fixed_override_wins_over_a_preset_that_varies(composer: Composer) -> None:
    config = composer.with_fixed(["zero.overlap_comm=false"]).compose({"strategy": "zero3"})
    assert (config.zero.stage, config.zero.overlap_comm) == (3, False)


def test_one_point_leaves_no_trace_in_the_next(composer: Composer) -> None:
    composer.compose({"micro_batch": 8})
    assert composer.compose().micro_batch == 1


def test_flat_gives_dotted_keys_without_hydras_own(composer: Composer) -> None:
    flat = composer.with_fixed(["zero.stage=2"]).flat()
    assert (flat["zero.stage"], flat["optimizer.betas"], flat["ranks"]) == (2, "[0.9, 0.95]", None)
    assert not any(key.startswith("hydra") for key in flat)


def test_a_bad_override_is_named_as_written(composer: Composer) -> None:
    assert problems(composer.with_fixed(["zero.stage=7"])) == (
        "zero.stage: 7 is too large; at most 3 (override 'zero.stage=7')",
    )


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("strategy/mine", "# @package _global_\nzero: {stage: 7}\n", "zero.stage"),
        ("lr/fast", "base: -1\n", "lr.base"),
        ("sweep", "defaults: [schema, lr: fast, _self_, strategy: mine]\nseq_len: 1\n", "seq_len"),
    ],
)
def test_a_bad_value_of_a_file_is_traced_to_it(
    own_conf: Path, compose_in: Callable[[Path], Composer], file: str, text: str, key: str
) -> None:
    (own_conf / f"{file}.yaml").write_text(text)
    (problem,) = problems(compose_in(own_conf))
    assert problem.startswith(f"{key}: ")
    assert problem.endswith(f"(conf/{file}.yaml)")


def test_an_override_outranks_the_file_as_the_origin(
    own_conf: Path, compose_in: Callable[[Path], Composer]
) -> None:
    composer = compose_in(own_conf).with_fixed(["lr.base=2e-3"])
    assert composer.origin("lr.base") == "override 'lr.base=2e-3'"
    assert composer.origin("zero.stage") == "conf/strategy/mine.yaml"
    assert composer.origin("micro_batch") is None


def test_broken_yaml_is_reported_with_its_file_and_line(
    own_conf: Path, compose_in: Callable[[Path], Composer]
) -> None:
    (own_conf / "lr" / "fast.yaml").write_text("base: 1e-3\nrule: {sqrt\n")
    (problem,) = problems(compose_in(own_conf))
    assert f"{own_conf}/lr/fast.yaml, line 3" in problem


def test_a_key_of_a_file_that_does_not_exist_is_refused_with_a_suggestion(
    own_conf: Path, compose_in: Callable[[Path], Composer]
) -> None:
    (own_conf / "lr" / "fast.yaml").write_text("bass: 1e-3\n")
    (problem,) = problems(compose_in(own_conf))
    assert "Key 'bass' not in 'LrConfig'" in problem
    assert "did you mean lr.base " in problem


def test_a_value_of_another_type_is_refused_in_one_line(composer: Composer) -> None:
    (problem,) = problems(composer, {"micro_batch": "two"})
    assert problem == "micro_batch=two: Value 'two' of type 'str' could not be converted to Integer"
    (problem,) = problems(composer.with_fixed(["zero.stage=nine"]))
    assert "Value 'nine' of type 'str' could not be converted to Integer" in problem


def test_a_point_with_an_unknown_knob_is_refused(composer: Composer) -> None:
    assert problems(composer, {"zero.stages": 1}) == ("zero.stages: no such knob; did you mean zero.stage?",)


def test_an_unknown_experiment_lists_the_others(composer: Composer) -> None:
    assert problems(composer.with_fixed(["experiment=nightly"])) == (
        "experiment=nightly: no such choice; there are article_7b_8gpu, quickstart",
    )
