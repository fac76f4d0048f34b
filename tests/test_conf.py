"""Every file of conf/ composes, explains itself, and keeps what its comment promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sweeps.config.compose import Composer
from sweeps.machine import Machine
from sweeps.models import model_shape
from sweeps.plan import Rejection, resolve
from tests.sweeps.conftest import composer_on

CONF = Path(__file__).resolve().parents[1] / "conf"
CHOICES = sorted(path.relative_to(CONF).with_suffix("") for path in CONF.glob("*/*.yaml"))
BUILT_MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "hf")
STRATEGIES = sorted(path.stem for path in (CONF / "strategy").glob("*.yaml"))
NEEDED = {"model=hf": ["model.path=/models/mine"], "data=text": ["data.path=/corpora/books"]}


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
    config = composer.compose({"strategy": name})
    machine = Machine(device="cpu", nodes=1, ranks_per_node=2)
    plan = resolve(config, model_shape(config.model), machine)
    assert not isinstance(plan, Rejection)
    assert plan.strategy == name


def test_the_default_model_follows_the_machine(composer: Composer) -> None:
    assert composer.compose().model.name == "tiny_llama"
