"""Every file of conf/ composes, begins with a comment, and does what the comment says."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest

from sweeps.config.compose import Composer
from sweeps.config.models import model_shape
from sweeps.machine import Gpu, Machine, Nvme
from sweeps.plan.planner import Planner
from sweeps.plan.resolve import Rejection, resolve
from sweeps.space.grammar import read_request, without_inactive
from sweeps.space.points import Settings
from tests.support.paths import ROOT
from tests.sweeps.conftest import composer_on

CONF = ROOT / "conf"
CHOICES = sorted(path.relative_to(CONF).with_suffix("") for path in CONF.glob("*/*.yaml"))
BUILT_MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "hf")
STRATEGIES = sorted(path.stem for path in (CONF / "strategy").glob("*.yaml"))
# Tables name a plan with its degrees; the names of presets have none.
TABLE_NAMES = {"tp_zero1": "tp2_zero1", "pp_zero1": "pp2_zero1", "hybrid_3d": "tp2_pp2_zero1"}
NEEDED = {"model=hf": ["model.path=/models/mine"], "data=text": ["data.path=/corpora/books"]}
TWO_CORES = Machine(
    device="cpu",
    nodes=1,
    ranks_per_node=2,
    cores=2,
    nvme=Nvme(path="/scratch", free_bytes=2**40),
    has_libaio=True,
)
H200 = Gpu(index=0, uuid="GPU-0", name="H200", memory_bytes=150 * 10**9, capability=(9, 0))
EIGHT_H200 = dataclasses.replace(TWO_CORES, device="cuda", ranks_per_node=8, gpus=(H200,) * 8)


@pytest.fixture(scope="module")
def composer() -> Composer:
    return composer_on(CONF)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_choice_composes(composer: Composer, choice: Path) -> None:
    override = f"{choice.parent}={choice.name}"
    composer.with_fixed([override, *NEEDED.get(override, [])]).compose()


@pytest.mark.parametrize("choice", [Path("sweep"), *CHOICES], ids=str)
def test_a_file_begins_with_a_comment_and_fits_on_a_screen(choice: Path) -> None:
    lines = (CONF / choice).with_suffix(".yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 60


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != Path("check/none")], ids=str)
def test_the_comment_shows_a_command_that_chooses_the_file(choice: Path) -> None:
    text = (CONF / choice).with_suffix(".yaml").read_text()
    comment = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    (command,) = re.findall(r"^# python sweep\.py .*$", comment, re.MULTILINE)
    assert re.search(rf" {choice.parent}(={choice.name}| |\.)", command)


@pytest.mark.parametrize("name", BUILT_MODELS)
def test_a_model_has_the_parameters_that_its_comment_states(composer: Composer, name: str) -> None:
    (stated,) = re.findall(r"^# ([\d,]+) parameters", (CONF / f"model/{name}.yaml").read_text(), re.MULTILINE)
    shape = model_shape(composer.with_fixed([f"model={name}"]).compose().model)
    assert (shape.name, shape.parameters) == (name, int(stated.replace(",", "")))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_makes_a_plan_of_its_name(composer: Composer, name: str) -> None:
    fixed = ["cluster.nvme_path=/scratch", "ranks=4"]
    config = composer.with_fixed(fixed).compose({"strategy": name})
    plan = resolve(config, model_shape(config.model), dataclasses.replace(TWO_CORES, ranks_per_node=4))
    assert not isinstance(plan, Rejection)
    assert plan.strategy == TABLE_NAMES.get(name, name)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_makes_a_legal_plan_of_a_large_model_on_eight_cards(composer: Composer, name: str) -> None:
    precision = ["precision=fp32"] if name == "tp2" else ["precision=bf16"]
    fixed = ["model=llama_7b", "cluster.nvme_path=/scratch", "micro_batch=4", *precision]
    config = composer.with_fixed(fixed).compose({"strategy": name})
    plan = resolve(config, model_shape(config.model), EIGHT_H200)
    assert not isinstance(plan, Rejection), plan.texts
    assert (plan.ranks, plan.strategy) == (8, TABLE_NAMES.get(name, name))
    assert plan.tensor * plan.pipeline * plan.data == 8


def test_tensor_parallel_without_zero_is_for_single_precision(composer: Composer) -> None:
    config = composer.with_fixed(["precision=bf16"]).compose({"strategy": "tp2"})
    plan = resolve(config, model_shape(config.model), EIGHT_H200)
    assert isinstance(plan, Rejection)
    assert [reason.rule for reason in plan.reasons] == ["tensor_parallel_clips_in_half_precision_with_zero"]


def test_the_default_model_follows_the_machine(composer: Composer) -> None:
    assert composer.compose().model.name == "tiny_llama"


SPACES = sorted(path.stem for path in (CONF / "space").glob("*.yaml") if path.stem != "none")


@pytest.mark.parametrize("name", SPACES)
def test_a_space_holds_legal_points_of_each_of_its_strategies(composer: Composer, name: str) -> None:
    request = read_request([f"space={name}", "cluster.nvme_path=/scratch"], composer)
    model = model_shape(request.composer.compose().model)
    planner = Planner(request.composer, model, TWO_CORES, "study")
    space = without_inactive(request, planner.is_active).space
    points = space.ends.sample(300, random.Random(0), planner.is_active)
    plans = [(point.get("strategy"), planner.plan(point).plan) for point in points]
    legal = {strategy for strategy, plan in plans if not isinstance(plan, Rejection)}
    assert legal == {strategy for strategy, _ in plans}


@pytest.mark.parametrize("name", SPACES)
def test_a_knob_of_a_space_matters_in_it_on_gpus(composer: Composer, name: str) -> None:
    strategies = ["strategy=glob(*)"] if name == "buckets" else []  # buckets has no strategies itself
    request = read_request([f"space={name}", *strategies], composer)
    gpus = Machine(device="cuda", nodes=1, ranks_per_node=8, cores=64)
    left = without_inactive(request, Settings(request.composer, gpus).is_active).space
    assert left == request.space


def test_the_full_space_holds_the_others(composer: Composer) -> None:
    full = {dimension.key for dimension in read_request(["space=full"], composer).space.dimensions}
    others = [name for name in SPACES if name not in ("full", "nvme")]
    named = {d.key for name in others for d in read_request([f"space={name}"], composer).space.dimensions}
    assert named - full == set()


def test_only_the_space_of_nvme_touches_a_disk() -> None:
    texts = {name: (CONF / f"space/{name}.yaml").read_text() for name in SPACES}
    assert [name for name, text in texts.items() if "zero3_nvme" in text] == ["nvme"]
