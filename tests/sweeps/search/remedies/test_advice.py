"""The next remedy in a study, given what it has tried. Plans are real, only the jobs are made up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sweeps.config.compose import Composer
from sweeps.config.models import model_shape
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Gpu, Machine, Nvme
from sweeps.plan.planner import Planner
from sweeps.search.advice import knobs_of, plan_of
from sweeps.search.remedies import (
    ChangedPlan,
    Changes,
    Grounds,
    Option,
    advise,
    known,
    nothing_left,
    options,
    remedies_for,
)
from tests.support.examples import a_measurement, a_trial
from train_entry.contract import Advice, Failure, FailureKind, Measurement, Scalar, Trial, size_text


@dataclass
class Lab:
    """A trial that ran out of memory, and what its study tries then. All is real but the jobs."""

    composer: Composer
    machine: Machine
    kind: FailureKind = FailureKind.GPU_OOM
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.composer.compose()
        room = room_of(config.cluster, config.gate, self.machine)
        self.model = model_shape(config.model)
        self.estimator = Estimator(self.model, hardware_for(self.machine), room, config.gate)
        self.planner = Planner(self.composer, self.model, self.machine, "mine")
        self.made: dict[tuple[frozenset[tuple[str, Scalar]], ...], ChangedPlan | None] = {}
        self.ended({}, self.kind)

    def plans(self, before: Changes, more: Changes) -> ChangedPlan | None:
        """Return the planner's plan, made once.

        A chain of advice asks for its first plans again and again.
        """
        key = (frozenset(before.items()), frozenset(more.items()))
        if key not in self.made:
            self.made[key] = plan_of(self.planner.plan, {})(before, more)
        return self.made[key]

    def ended(self, changes: Mapping[str, Scalar], kind: FailureKind | None) -> None:
        """Add a trial of the study with these changes; kind None: it fits."""
        planned = self.plans(changes, {})
        assert planned is not None
        outcome = a_measurement() if kind is None else Failure(kind=kind, message="full")
        trial = a_trial(
            number=len(self.trials) + 1,
            plan=planned.plan,
            fingerprint=planned.fingerprint,
            outcome=outcome,
        )
        self.trials.append(trial)

    @property
    def grounds(self) -> Grounds:
        return Grounds(
            device=self.machine.device,
            model=self.model,
            plan_of=self.plans,
            expect=self.estimator.estimate,
            tried=known(self.trials),
        )

    def options(self) -> list[Option]:
        return list(options(self.trials[0], self.grounds))

    def advice(self) -> Advice | None:
        return advise(self.trials[0], self.grounds)

    def until_nothing_is_left(self) -> list[str]:
        """Return the remedies' names in order, if each that is tried fails as the trial itself did."""
        names = []
        while (advice := self.advice()) is not None:
            names.append(advice.remedy)
            self.ended(advice.changes, self.kind)
            assert len(names) < 40, "there is no end of advice"
        return names


def gpus(count: int, **changes: Any) -> Machine:
    cards = tuple(
        Gpu(index=index, uuid=f"GPU-{index}", name="H200", memory_bytes=2**37, capability=(9, 0))
        for index in range(count)
    )
    return Machine(
        **{"device": "cuda", "nodes": 1, "ranks_per_node": count, "gpus": cards, "cores": 64, **changes}
    )


@pytest.fixture
def lab(composer: Composer) -> Callable[..., Lab]:
    def make(overrides: Sequence[str], machine: Machine, kind: FailureKind = FailureKind.GPU_OOM) -> Lab:
        return Lab(composer.with_fixed(["precision=auto", *overrides]), machine, kind)

    return make


ON_DDP = ("model=llama_1b3", "strategy=ddp", "micro_batch=1")
SEVEN_BILLION = ("model=llama_7b", "strategy=zero2", "micro_batch=2")


def test_the_first_advice_is_checkpointing_with_the_command_that_tries_it(lab: Callable[..., Lab]) -> None:
    advice = lab(SEVEN_BILLION, gpus(8)).advice()
    assert advice is not None
    assert (advice.remedy, advice.changes) == (
        "activation_checkpointing",
        {"activation_checkpointing": "full"},
    )
    assert advice.overrides == ("precision=auto", *SEVEN_BILLION, "activation_checkpointing=full")


def test_what_ran_out_too_stays_and_the_next_comes_on_top(lab: Callable[..., Lab]) -> None:
    study = lab(SEVEN_BILLION, gpus(8))
    study.ended({"activation_checkpointing": "full"}, FailureKind.GPU_OOM)
    advice = study.advice()
    assert advice is not None
    # By then the optimizer's update is the peak: this closes its gaps; a smaller micro-batch does not help.
    assert advice.changes == {"activation_checkpointing": "full", "allocator.expandable_segments": True}


def test_what_fits_is_left_out_again_so_that_another_way_is_tried(lab: Callable[..., Lab]) -> None:
    study = lab(SEVEN_BILLION, gpus(8))
    study.ended({"activation_checkpointing": "full"}, None)
    advice = study.advice()
    assert advice is not None
    assert advice.changes == {"micro_batch": 1}


OF_THE_PLAN = [
    getattr(FailureKind, name) for name in ("BAD_CONFIG", "DIVERGED", "TIMED_OUT", "CRASHED", "HUNG")
]
OF_THE_PLACE = [getattr(FailureKind, name) for name in ("NODE_LOST", "PEER_LOST", "PREEMPTED", "COMMS")]


@pytest.mark.parametrize("kind", OF_THE_PLAN)
def test_what_failed_otherwise_is_left_out_and_the_next_is_tried(
    lab: Callable[..., Lab], kind: FailureKind
) -> None:
    study = lab(SEVEN_BILLION, gpus(8))
    study.ended({"activation_checkpointing": "full"}, kind)
    advice = study.advice()
    assert advice is not None
    assert advice.changes == {"micro_batch": 1}


@pytest.mark.parametrize("kind", OF_THE_PLACE)
def test_what_a_lost_node_ended_is_advised_again(lab: Callable[..., Lab], kind: FailureKind) -> None:
    study = lab(SEVEN_BILLION, gpus(8))
    study.ended({"activation_checkpointing": "full"}, kind)
    advice = study.advice()
    assert advice is not None
    assert advice.changes == {"activation_checkpointing": "full"}


@pytest.mark.parametrize("order", [(None, FailureKind.CRASHED), (FailureKind.CRASHED, None)])
def test_of_two_trials_of_a_plan_the_one_that_fits_counts(
    lab: Callable[..., Lab], order: tuple[FailureKind | None, ...]
) -> None:
    study = lab(SEVEN_BILLION, gpus(8))
    for kind in order:
        study.ended({"micro_batch": 1}, kind)
    numbers = {trial.number: trial.outcome for trial in known(study.trials).values()}
    assert isinstance(numbers[2 + order.index(None)], Measurement)
    assert len(numbers) == 2


# ---------------------------------------------------------------- estimates decide


def changes_of(options: Sequence[Option]) -> list[Changes]:
    return [option.candidate.changes for option in options]


def test_what_is_not_expected_to_fit_is_not_launched_and_the_next_comes_on_top(
    lab: Callable[..., Lab],
) -> None:
    full = {"activation_checkpointing": "full"}
    for limit_gib, then in ((40, full), (31, {**full, "allocator.expandable_segments": True})):
        study = lab((*SEVEN_BILLION, f"cluster.memory_limit_gib={limit_gib}"), gpus(8))
        advice = study.advice()
        assert advice is not None
        assert advice.changes == then
    skipped, last = study.options()
    assert skipped.candidate.changes == full
    assert (skipped.is_open, last.is_open) == (False, True)
    assert "of 31.00 GiB, cluster.memory_limit_gib=31" in skipped.expected.why


def test_where_nothing_is_expected_to_fit_there_is_no_advice(lab: Callable[..., Lab]) -> None:
    study = lab((*SEVEN_BILLION, "cluster.memory_limit_gib=2"), gpus(8, host_memory_bytes=2**40))
    found = study.options()
    assert not any(option.is_open for option in found)
    assert study.advice() is None
    assert nothing_left(study.trials[0], "cuda", found) == (
        "no remaining remedy is expected to fit: use a larger GPU, more ranks or a smaller model"
    )


def test_what_would_fill_the_host_is_left_out_again(lab: Callable[..., Lab]) -> None:
    limit = ("activation_checkpointing=full", "micro_batch=1", "cluster.memory_limit_gib=12")
    study = lab(("model=llama_7b", "strategy=zero3", *limit), gpus(8, host_memory_bytes=64 * 2**30))
    found = study.options()
    offloaded = [option for option in found if option.remedy.name == "optimizer_to_cpu"]
    assert offloaded
    assert all(FailureKind.HOST_OOM in option.ends("cuda") for option in offloaded)
    others = [option for option in found if option not in offloaded]
    assert others
    assert not any("zero.offload_optimizer" in changes for changes in changes_of(others))


def test_a_saving_is_the_difference_of_two_estimates(lab: Callable[..., Lab]) -> None:
    study = lab(SEVEN_BILLION, gpus(8))
    (option,) = study.options()
    before = study.trials[0].plan
    assert before is not None
    expect = study.estimator.estimate
    saved = expect(before).peak_bytes - expect(option.candidate.plan).peak_bytes
    assert option.why == f"saves about {size_text(saved)} a rank: each block keeps only its input"


def test_on_a_full_host_a_saving_is_of_its_memory(lab: Callable[..., Lab]) -> None:
    study = lab(("model=llama_1b3", "strategy=zero3_offload"), gpus(1), FailureKind.HOST_OOM)
    assert re.match(
        r"saves about [\d.]+ GiB of the node's host memory: torch rounds page-locked", study.options()[0].why
    )


# ---------------------------------------------------------------- the order


def test_sharding_comes_before_offloading(lab: Callable[..., Lab]) -> None:
    names = lab(ON_DDP, gpus(2)).until_nothing_is_left()
    assert names[:3] == ["activation_checkpointing", "buckets", "allocator"]
    assert names.index("sharding") < names.index("optimizer_to_cpu") < names.index("weights_to_cpu")


def test_a_zero_stage_that_saves_nothing_is_passed_over(lab: Callable[..., Lab]) -> None:
    """With the optimizer on the CPU, zero2 needs what zero1 needs here, and zero3 needs less."""
    study = lab(ON_DDP, gpus(2))
    study.until_nothing_is_left()
    strategies = [trial.plan.strategy for trial in study.trials if trial.plan]
    assert strategies.index("zero1") < strategies.index("zero3_offload")
    assert not any(strategy.startswith("zero2") for strategy in strategies)


def test_on_one_gpu_ddp_goes_straight_to_the_cpu(lab: Callable[..., Lab]) -> None:
    names = lab(ON_DDP, gpus(1)).until_nothing_is_left()
    assert "sharding" not in names
    assert names.index("optimizer_to_cpu") < names.index("weights_to_cpu")


def test_each_remedy_makes_a_plan_that_the_study_had_not(lab: Callable[..., Lab]) -> None:
    study = lab(ON_DDP, gpus(2))
    study.until_nothing_is_left()
    prints = [trial.fingerprint for trial in study.trials]
    assert len(prints) == len(set(prints))


def test_a_preset_that_knobs_beside_it_would_undo_is_spelled_out(lab: Callable[..., Lab]) -> None:
    study = lab(("model=llama_1b3", "engine=ddp", "zero.stage=0", "micro_batch=1"), gpus(2))
    assert study.until_nothing_is_left().count("sharding") == 2
    plans = [trial.plan.strategy for trial in study.trials if trial.plan]
    assert plans[-1] == "zero3_offload"


def test_the_knobs_of_a_preset_make_the_plan_that_its_name_makes(composer: Composer) -> None:
    for name in composer.options("strategy"):
        spelled = composer.compose({"strategy": "ddp", **knobs_of(name)})
        assert spelled == composer.compose({"strategy": name}), name


def test_where_offloading_fills_the_host_the_disk_is_next(lab: Callable[..., Lab]) -> None:
    disk = Nvme(path="/scratch", free_bytes=2**42)
    done = [
        f"zero.{key}=5e6" for key in ("reduce_bucket_size", "prefetch_bucket_size", "max_live_parameters")
    ]
    done += [
        "activation_checkpointing=full",
        "allocator.expandable_segments=true",
        "cluster.nvme_path=/scratch",
    ]
    study = lab(("model=llama_1b3", "strategy=zero3", *done), gpus(1, nvme=disk, has_libaio=True))
    study.ended({"zero.offload_optimizer": "cpu"}, FailureKind.HOST_OOM)
    study.ended({"zero.offload_param": "cpu"}, FailureKind.HOST_OOM)
    advice = study.advice()
    assert advice is not None
    assert advice.changes == {"zero.offload_optimizer": "nvme"}


def test_without_a_disk_there_is_no_such_advice(lab: Callable[..., Lab]) -> None:
    names = lab(("model=llama_1b3", "strategy=zero3_offload"), gpus(1), FailureKind.HOST_OOM)
    assert names.until_nothing_is_left() == [
        "unpinned",
        "weights_back",
        "half_the_optimizer",
        "optimizer_back",
    ]


def test_on_cpu_nothing_is_offloaded_to_where_it_is(lab: Callable[..., Lab], machine: Machine) -> None:
    names = lab(("strategy=ddp", "micro_batch=4"), machine, FailureKind.HOST_OOM).until_nothing_is_left()
    assert names[:2] == ["activation_checkpointing", "micro_batch"]
    assert "sharding" in names
    assert not {"optimizer_to_cpu", "weights_to_cpu", "unpinned"} & set(names)


@pytest.mark.parametrize("kind", [FailureKind.DIVERGED, FailureKind.CRASHED, FailureKind.HUNG])
def test_a_failure_that_is_not_about_memory_has_no_remedy(lab: Callable[..., Lab], kind: FailureKind) -> None:
    study = lab(SEVEN_BILLION, gpus(8), kind)
    assert study.advice() is None
    assert nothing_left(study.trials[0], "cuda") == "it did not run out of memory"
    assert remedies_for(kind, "cuda") == ()


def test_a_full_host_without_offload_is_told_where_else_to_look(lab: Callable[..., Lab]) -> None:
    study = lab(("model=llama_1b3", "strategy=zero3"), gpus(2), FailureKind.HOST_OOM)
    assert study.advice() is None
    assert "fewer ranks on this host" in nothing_left(study.trials[0], "cuda")


def test_when_all_is_tried_the_way_out_is_not_a_knob(lab: Callable[..., Lab]) -> None:
    study = lab(ON_DDP, gpus(2))
    study.until_nothing_is_left()
    assert nothing_left(study.trials[0], "cuda") == (
        "every remedy that saves memory has been tried: use a larger GPU, more ranks or a smaller model"
    )
