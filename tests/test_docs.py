"""Compare the documents with the code: keys, defaults, failures, rules, links, and commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main as analysis_main
from sweeps.__main__ import main as sweeps_main
from sweeps.config.compose import Composer
from sweeps.config.keys import KEYS
from sweeps.config.knob import Scope
from sweeps.config.models import model_shape
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from sweeps.plan.planner import Planner
from sweeps.plan.rules import RULES
from sweeps.search.verdicts import VERDICTS
from sweeps.space.grammar import read_request
from tests.support.paths import ROOT
from tests.sweeps.conftest import composer_on
from train_entry.contract import Failure, FailureKind, state_of

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
FLAGS = ("-m", "--help")
TWO_CORES = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)


def rows(document: str, columns: int) -> list[list[str]]:
    """Return the rows, with this number of columns, of all tables whose first column is code."""
    lines = [line for line in TEXTS[document].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if len(row) == columns]


def examples() -> Iterator[tuple[str, str]]:
    """Yield each wrong input of the README: the command, and the message that it prints."""
    block = TEXTS["README.md"].partition("<!-- errors -->\n```text\n")[2].partition("```")[0]
    for example in block.split("$ ")[1:]:
        command, _, message = example.partition("\n")
        yield command, message.rstrip("\n")


def commands(program: str) -> list[str]:
    """Return all commands in code blocks and in code within text that begin with `program`.

    Wrong inputs and commands with placeholders are left out.
    """
    found: dict[str, None] = {}
    for text in TEXTS.values():
        text = re.sub(r"<!-- errors -->.*?<!-- /errors -->", "", text, flags=re.DOTALL)
        for line in re.findall(rf"(?:^|`)({program}[^`\n]*)", text, re.MULTILINE):
            found[shlex.join(shlex.split(line, comments=True))] = None
    return [command for command in found if not re.search(r"\b(KEY|STUDY_DIR|NAME)\b", command)]


def arguments(command: str) -> list[str]:
    return [word for word in shlex.split(command)[2:] if word not in FLAGS]


@pytest.fixture(scope="module")
def composer() -> Composer:
    return composer_on(ROOT / "conf")


# ---------------------------------------------------------------- keys

KNOBS = {row[0].strip("`"): row for row in rows("docs/knobs.md", columns=7)}
CHANGES_PER = {
    Scope.TRIAL: "trial",
    Scope.STUDY: "study",
    Scope.IDENTITY: "study",
    Scope.SEARCH: "start",
    Scope.START: "start",
}


def same(text: str, value: Any) -> bool:
    """True if a default as it is written, such as 5e8, equals the schema's default."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(text) == value
    return text == (value if isinstance(value, str) and value else json.dumps(value))


def test_every_key_is_documented_once_and_no_other() -> None:
    keys = [row[0].strip("`") for row in rows("docs/knobs.md", columns=7)]
    assert sorted(keys) == sorted(KEYS)


def test_keys_stand_in_the_order_of_the_schema() -> None:
    assert list(KNOBS) == list(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_a_documented_default_is_the_schemas(key: str) -> None:
    assert same(KNOBS[key][1].strip("`"), KEYS[key].default)


def test_documented_units_are_the_schemas() -> None:
    assert {key: row[2] for key, row in KNOBS.items()} == {
        key.name: key.declared.unit for key in KEYS.values()
    }


def test_it_is_documented_how_long_a_key_keeps_its_value() -> None:
    assert {key: row[3] for key, row in KNOBS.items()} == {
        key.name: CHANGES_PER[key.scope] for key in KEYS.values()
    }


def test_it_is_documented_when_a_knob_is_active() -> None:
    assert {key: row[4] for key, row in KNOBS.items()} == {
        key.name: key.active_when.text if key.active_when else "" for key in KEYS.values()
    }


def test_every_choice_of_a_key_is_named() -> None:
    unnamed = [
        f"{key.name}={choice}"
        for key in KEYS.values()
        for choice in key.declared.choices
        if f"`{choice}`" not in "".join(KNOBS[key.name])
    ]
    assert unnamed == []


# ---------------------------------------------------------------- failures


def test_every_failure_is_explained_as_the_code_does() -> None:
    documented = {row[0].strip("`"): row[1] for row in rows("docs/failures.md", columns=6)}
    assert documented == {kind.value: kind.explanation for kind in FailureKind}


def test_documented_states_and_verdicts_are_the_codes() -> None:
    documented = {row[0].strip("`"): (row[3], row[4]) for row in rows("docs/failures.md", columns=6)}
    assert documented == {
        kind.value: (state_of(Failure(kind=kind, message="")).value, verdict.value)
        for kind, verdict in VERDICTS.items()
    }


# ---------------------------------------------------------------- rules


def test_every_rule_is_documented_as_the_code_has_it() -> None:
    documented = {row[0].strip("`"): (row[1], row[2]) for row in rows("docs/rules.md", columns=3)}
    assert documented == {rule.name: (rule.explanation, rule.source) for rule in RULES}


# ---------------------------------------------------------------- links and commands


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", TEXTS[document])
    targets = [((ROOT / document).parent / path if path else ROOT / document, name) for path, name in links]
    assert [path for path, _ in targets if not path.exists()] == []
    assert [name for path, name in targets if name and name not in anchors(path.read_text())] == []


@pytest.mark.parametrize("command", commands(r"python sweep\.py"))
def test_a_sweep_that_is_shown_composes(command: str, composer: Composer) -> None:
    read_request(arguments(command), composer).composer.compose()


@pytest.mark.parametrize("override", re.findall(r"^\| `'?([^`']+)'?` \|", TEXTS["README.md"], re.MULTILINE))
def test_an_override_that_is_shown_composes(override: str, composer: Composer) -> None:
    read_request([override], composer)


@pytest.mark.parametrize("command", commands(r"python -m (?:analysis|sweeps) "))
def test_a_command_that_is_shown_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mains: dict[str, Callable[[list[str]], int]] = {"analysis": analysis_main, "sweeps": sweeps_main}
    _, _, package, *rest = shlex.split(command)
    assert mains[package](rest) == 2  # no such study here; a command that is not understood raises SystemExit


def test_targets_that_are_shown_exist() -> None:
    shown = re.findall(r"(?:^|`)make (\w+)", "\n".join(TEXTS.values()), re.MULTILINE)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(shown) - set(targets) == set()


@pytest.mark.parametrize(("command", "message"), list(examples()))
def test_a_wrong_input_is_answered_as_shown(command: str, message: str, composer: Composer) -> None:
    alone = [] if "-m" in shlex.split(command) else ["space=none"]  # sweep.py adds it without -m
    with pytest.raises(ConfigError) as refused:
        request = read_request([*arguments(command), *alone], composer)
        model = model_shape(request.composer.compose().model)
        Planner(request.composer, model, TWO_CORES, "study").require_legal(request.space)
    assert str(refused.value) == message


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    named = re.findall(
        r"`((?:conf|sweeps|train_entry|analysis|tests|docs)/[\w./]*(?:\.\w+|/))`", TEXTS[document]
    )
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []
