"""Command lines: which knobs vary over which values, and which are fixed."""

from __future__ import annotations

import pytest

from sweeps.config.compose import Composer
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from sweeps.paths import CONF
from sweeps.space.dimensions import Choices, Dimension, Interval
from sweeps.space.grammar import pinned_values, read_request, without_inactive
from sweeps.space.points import Settings
from train_entry.contract import Scalar

CPU = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)
BOTH = "[zero,buckets]"
STRATEGIES = tuple(sorted(path.stem for path in (CONF / "strategy").glob("*.yaml")))


def dimensions(composer: Composer, *arguments: str) -> dict[str, Dimension]:
    return {dimension.key: dimension for dimension in read_request(arguments, composer).space.dimensions}


def values(composer: Composer, *arguments: str) -> dict[str, tuple[Scalar, ...]]:
    found = dimensions(composer, *arguments).items()
    return {key: dim.range.values for key, dim in found if isinstance(dim.range, Choices)}


def interval(composer: Composer, argument: str) -> Interval:
    (dimension,) = dimensions(composer, argument).values()
    assert isinstance(dimension.range, Interval)
    return dimension.range


def problems(composer: Composer, *arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_request(arguments, composer)
    return caught.value.problems


# ---------------------------------------------------------------- the grammar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,2,4", (1, 2, 4)),
        ("choice(1,2,4)", (1, 2, 4)),
        ("1,1,2", (1, 2)),
        ("range(1,5)", (1, 2, 3, 4)),
        ("range(2,9,3)", (2, 5, 8)),
        ("sort(4,1,2)", (1, 2, 4)),
        ("sort(4,1,2,reverse=true)", (4, 2, 1)),
        ("sort(choice(4,1,2))", (1, 2, 4)),
        ("int(choice(1.0,2.0))", (1, 2)),
    ],
)
def test_a_sweep_override_lists_its_values_in_order(
    composer: Composer, text: str, expected: tuple[int, ...]
) -> None:
    assert values(composer, f"micro_batch={text}") == {"micro_batch": expected}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("zero.overlap_comm=true,false", (True, False)),
        ("ranks=null,1", (None, 1)),
        ("precision='fp32','bf16'", ("fp32", "bf16")),
        ("lr.base=range(0.1,0.5,0.1)", (0.1, 0.2, 0.3, 0.4)),
        ("optimizer.betas=[0.9,0.95],[0.9,0.99]", ("[0.9, 0.95]", "[0.9, 0.99]")),
        ("zero.reduce_bucket_size=5e7,1e8", (5e7, 1e8)),
        ("lr=sqrt,none", ("sqrt", "none")),
    ],
)
def test_values_keep_their_type(composer: Composer, argument: str, expected: tuple[Scalar, ...]) -> None:
    (found,) = values(composer, argument).values()
    assert found == expected
    assert [type(value) for value in found] == [type(value) for value in expected]


def test_glob_lists_the_files_of_a_group(composer: Composer) -> None:
    everything = values(composer, "strategy=glob(*)")
    assert everything == {"strategy": STRATEGIES}
    some = values(composer, "strategy=glob(zero?,exclude=[zero0,zero3])")
    assert some == {"strategy": ("zero1", "zero2")}


def test_a_glob_without_matches_is_refused(composer: Composer) -> None:
    assert problems(composer, "strategy=glob(fsdp*)") == ("strategy=glob(fsdp*): matches nothing",)


def test_shuffle_reorders_by_the_seed_so_that_a_resumed_study_finds_the_same_order(
    composer: Composer,
) -> None:
    first = values(composer, "micro_batch=shuffle(1,2,4,8,16)")["micro_batch"]
    other = values(composer, "micro_batch=shuffle(1,2,4,8,16)", "search.seed=1")["micro_batch"]
    assert first == values(composer, "micro_batch=shuffle(1,2,4,8,16)")["micro_batch"]
    assert sorted(map(str, first)) == sorted(map(str, other))
    assert len({first, other, (1, 2, 4, 8, 16)}) == 3


def test_an_interval_of_micro_batches_snaps_to_powers_of_two(composer: Composer) -> None:
    assert values(composer, "micro_batch=interval(1,8)") == {"micro_batch": (1, 2, 4, 8)}
    assert values(composer, "micro_batch=int(interval(3,17))") == {"micro_batch": (4, 8, 16)}
    assert (
        "micro_batch=interval(5,7): contains no power of two"
        in problems(composer, "micro_batch=interval(5,7)")[0]
    )


def test_an_interval_of_buckets_snaps_to_two_digits(composer: Composer) -> None:
    found = interval(composer, "zero.reduce_bucket_size=tag(log,interval(5e7,1e9))")
    assert found == Interval(low=5e7, high=1e9, log=True, integral=True, digits=2)
    assert found.snap(123_456_789.0) == 120_000_000


@pytest.mark.parametrize(
    ("argument", "integral"),
    [
        ("seq_len=interval(64,128)", True),
        ("gradient_clipping=interval(0.5,2)", False),
        ("gradient_clipping=int(interval(1,4))", True),
        ("lr.base=tag(log,interval(1e-4,1e-2))", False),
    ],
)
def test_an_interval_is_whole_where_its_knob_or_its_text_says_so(
    composer: Composer, argument: str, integral: bool
) -> None:
    assert interval(composer, argument).integral is integral


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("micro_batch=interval(8,1)", "the interval is empty"),
        ("lr.base=tag(log,interval(0,1))", "a logarithmic interval must begin above 0"),
        ("strategy=interval(0,1)", "only a numeric knob can have an interval"),
        ("zero.overlap_comm=interval(0,1)", "only a numeric knob can have an interval"),
        ("micro_batch=tag(linear,interval(1,8))", "tag linear is unknown; the only tag is log"),
    ],
)
def test_an_interval_without_meaning_is_refused(composer: Composer, argument: str, problem: str) -> None:
    (found,) = problems(composer, argument)
    assert found.startswith(f"{argument}: ")
    assert problem in found


def test_a_text_that_is_not_in_the_grammar_is_refused(composer: Composer) -> None:
    assert len(problems(composer, "micro_batch=choice(1,2")) == 1


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "argument",
    ["model=tiny_llama,llama_7b", "study=a,b", "data.path='a','b'", "cluster.memory_limit_gib=40,80"],
)
def test_what_is_fixed_within_a_study_is_no_dimension(composer: Composer, argument: str) -> None:
    key = argument.partition("=")[0]
    expected = f"{key}: fixed within a study; give it one value, and start another study for another value"
    assert problems(composer, argument) == (expected,)


@pytest.mark.parametrize(
    "argument",
    [
        "limits.trials=1,2",
        "search=tpe,random",
        "gate.quantile=0.5,0.9",
        "check.best=0,1",
        "tracking.kind=a,b",
    ],
)
def test_what_the_next_start_may_change_is_no_dimension_either(composer: Composer, argument: str) -> None:
    key = argument.partition("=")[0]
    expected = f"{key}: cannot vary; give it one value, which the next start of the study may change"
    assert problems(composer, argument) == (expected,)


def test_a_mistyped_knob_is_named_with_what_it_may_have_meant(composer: Composer) -> None:
    assert problems(composer, "micro_batsh=1,2") == ("micro_batsh: no such knob; did you mean micro_batch?",)
    assert "did you mean micro_batch?" in problems(composer, "micro_batsh=1")[0]


def test_a_plus_does_not_let_unknown_keys_in(composer: Composer) -> None:
    assert "only existing knobs can vary" in problems(composer, "+zero.stages=1,2")[0]
    assert problems(composer, "+zero.stages=1") == ("zero.stages: no such key; did you mean zero.stage?",)


def test_an_unknown_choice_lists_the_others(composer: Composer) -> None:
    expected = (f"strategy=zero9: no such choice; there are {', '.join(STRATEGIES)}",)
    assert problems(composer, "strategy=zero9") == expected
    assert problems(composer, "strategy=zero1,zero9") == expected


# ---------------------------------------------------------------- values


def test_a_bad_value_among_good_swept_ones_is_found_before_anything_runs(composer: Composer) -> None:
    assert problems(composer, "micro_batch=1,0,2") == (
        "micro_batch: 0 is too small; at least 1 (micro_batch=0)",
    )


def test_the_ends_of_an_interval_are_checked_too(composer: Composer) -> None:
    assert problems(composer, "zero.stage=interval(1,4)") == (
        "zero.stage: 4 is too large; at most 3 (zero.stage=4)",
    )


def test_all_problems_of_a_command_line_are_reported_at_once(composer: Composer) -> None:
    found = problems(composer, "micro_batch=0,two", "strategy=zero9,ddp", "zero.stage=7,1")
    assert len(found) == 4
    assert found[1].startswith("micro_batch=two: ")
    assert [text.partition(":")[0] for text in found[2:]] == ["strategy=zero9", "zero.stage"]


def test_all_bad_keys_are_reported_at_once(composer: Composer) -> None:
    assert len(problems(composer, "limits.trials=1,2", "zero.stages=1,2", "+foo=1,2")) == 3


def test_sizes_may_be_written_as_floats_but_must_be_whole(composer: Composer) -> None:
    request = read_request(["space=none", "zero.reduce_bucket_size=5e7"], composer)
    assert request.composer.compose().zero.reduce_bucket_size == 50_000_000
    assert problems(composer, "zero.reduce_bucket_size=5.5")[0].startswith(
        "zero.reduce_bucket_size: 5.5 is not a whole number"
    )


# ---------------------------------------------------------------- spaces


def test_the_default_space_counts_where_nothing_is_swept(composer: Composer) -> None:
    assert values(composer) == {"strategy": ("ddp", "zero1", "zero2", "zero3"), "micro_batch": (1, 2, 4)}
    assert values(composer, "strategy=ddp") == {"micro_batch": (1, 2, 4)}


def test_the_default_space_gives_way_to_a_sweep_override(composer: Composer) -> None:
    assert values(composer, "seq_len=32,64") == {"seq_len": (32, 64)}


def test_a_space_that_is_chosen_merges_with_sweep_overrides_which_replace_its_ranges(
    composer: Composer,
) -> None:
    merged = values(composer, "space=quickstart", "micro_batch=8,16", "seq_len=32,64")
    assert merged == {
        "micro_batch": (8, 16),
        "seq_len": (32, 64),
        "strategy": ("ddp", "zero1", "zero2", "zero3"),
    }


def test_several_spaces_merge(composer: Composer) -> None:
    zero, buckets, both = (list(dimensions(composer, f"space={name}")) for name in ("zero", "buckets", BOTH))
    assert both == zero + buckets


def test_a_knob_of_a_space_can_be_dropped(composer: Composer) -> None:
    kept = dimensions(composer, "space=zero", "~space.strategy")
    assert list(kept) == ["micro_batch", "activation_checkpointing"]


def test_a_plain_override_pins_a_dimension(composer: Composer) -> None:
    request = read_request(["space=zero", "micro_batch=4", "strategy=zero2"], composer)
    assert [dimension.key for dimension in request.space.dimensions] == ["activation_checkpointing"]
    assert request.composer.compose().micro_batch == 4


def test_a_knob_added_to_the_space_on_the_command_line_varies(composer: Composer) -> None:
    assert values(composer, "space=none", "+space.micro_batch='1,2'") == {"micro_batch": (1, 2)}


def test_space_none_has_one_point(composer: Composer) -> None:
    assert read_request(["space=none"], composer).space.size() == 1


# ---------------------------------------------------------------- pinned values


def test_the_values_that_a_command_line_pins_leave_study_keys_out(composer: Composer) -> None:
    arguments = ["strategy=zero2", "micro_batch=4", "study=mine", "limits.trials=3", "seq_len=1,2", "~space"]
    assert pinned_values(arguments, composer) == {"strategy": "zero2", "micro_batch": 4}


# ---------------------------------------------------------------- knobs without effect


def kept(composer: Composer, *arguments: str) -> list[str]:
    """Return the dimensions that are left without those that change nothing."""
    request = read_request(arguments, composer)
    space = without_inactive(request, Settings(request.composer, CPU).is_active).space
    return [dimension.key for dimension in space.dimensions]


def refused(composer: Composer, *arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        kept(composer, *arguments)
    return caught.value.problems


def test_a_knob_that_is_asked_for_and_matters_nowhere_is_refused(composer: Composer) -> None:
    assert refused(composer, "zero.allgather_bucket_size=1e7,5e7") == (
        "zero.allgather_bucket_size: changes nothing in this space: "
        "it has an effect only with a torch without all_gather_into_tensor",
    )
    (problem,) = refused(composer, "strategy=ddp,zero1", "zero.prefetch_bucket_size=1e7,5e7")
    assert problem.endswith("it has an effect only with zero.stage=3")


def test_all_knobs_that_matter_nowhere_are_reported_at_once(composer: Composer) -> None:
    asked = ("strategy=zero1", "zero.prefetch_bucket_size=1e7,5e7", "ddp.bucket_cap_mb=1,2")
    assert [text.partition(":")[0] for text in refused(composer, *asked)] == [
        "zero.prefetch_bucket_size",
        "ddp.bucket_cap_mb",
    ]


def test_a_knob_that_the_command_line_adds_to_the_space_is_asked_for_too(composer: Composer) -> None:
    (problem,) = refused(composer, "space=none", "+space.grad_accum_dtype='auto,fp32'", "strategy=ddp")
    assert problem.startswith("grad_accum_dtype: changes nothing in this space")


def test_a_knob_that_matters_somewhere_is_kept(composer: Composer) -> None:
    asked = ("strategy=ddp,zero3", "zero.prefetch_bucket_size=1e7,5e7")
    assert kept(composer, *asked) == ["strategy", "zero.prefetch_bucket_size"]
    assert kept(composer, "zero.prefetch_bucket_size=1e7,5e7", "zero.stage=1,3")[0] == (
        "zero.prefetch_bucket_size"
    )


def test_a_knob_of_a_space_file_that_matters_nowhere_is_left_out(composer: Composer) -> None:
    assert set(kept(composer, "space=buckets", "strategy=ddp")) == {
        "ddp.bucket_cap_mb",
        "ddp.gradient_as_bucket_view",
    }


def test_a_value_that_needs_another_varying_knob_is_judged_beside_it(composer: Composer) -> None:
    assert kept(composer, "lr.schedule=constant,cosine", "lr.total_steps=100,200") == [
        "lr.schedule",
        "lr.total_steps",
    ]
    assert problems(composer, "lr.schedule=constant,cosine")[0].startswith("lr.total_steps: is not set")
