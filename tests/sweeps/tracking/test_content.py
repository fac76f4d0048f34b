"""The location of the table in MLflow, and its columns, without MLflow itself."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sweeps.errors import TrackingError
from sweeps.tracking.content import run_content, runs_url, shared_view
from sweeps.tracking.location import default_uri, mask_password, ui_command
from tests.support.estimates import a_refused_trial, an_estimate
from tests.support.examples import a_plan
from tests.support.tracking import measured, study_record
from train_entry.contract import Goal

# The location of the table


MOUNTS = """\
overlay / overlay rw 0 0
proc /proc proc rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/local ext4 rw 0 0
lustre@tcp:/scratch /scratch lustre rw 0 0
systemd-1 /auto autofs rw 0 0
server:/auto /auto nfs rw 0 0
beegfs /data\\040sets beegfs rw 0 0
"""


@pytest.mark.parametrize("studies", ["/srv/studies", "/home/local/me/studies", "/homes/studies"])
def test_studies_on_a_local_disk_have_the_database_beside_them(studies: str) -> None:
    assert default_uri(Path(studies), MOUNTS) == f"sqlite:///{studies}/mlflow.db"


@pytest.mark.parametrize("studies", ["/home/me/studies", "/scratch/studies", "/auto/studies", "/data sets/s"])
def test_studies_on_a_network_filesystem_have_it_on_this_host(
    studies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    uris = {default_uri(Path(studies), MOUNTS), default_uri(Path(studies) / "other", MOUNTS)}

    assert len(uris) == 2
    assert all(uri.startswith(f"sqlite:///{tmp_path}/shardsweep/mlflow-") for uri in uris)
    assert (tmp_path / "shardsweep").is_dir()


def test_where_the_home_is_on_the_network_too_it_is_in_var_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    found = Path.cwd().lstat()
    monkeypatch.setenv("XDG_STATE_HOME", "/home/me/state")
    monkeypatch.setattr(Path, "mkdir", lambda self, **_: made.append(str(self)))  # creates nothing
    monkeypatch.setattr(Path, "lstat", lambda _self: found)
    monkeypatch.setattr(os, "getuid", lambda: found.st_uid)

    uri = default_uri(Path("/home/me/studies"), MOUNTS)

    assert made == [f"/var/tmp/shardsweep-{os.getuid()}"]
    assert uri.startswith(f"sqlite:///{made[0]}/mlflow-")


@pytest.fixture
def var_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mounts of a host whose home is on a network filesystem."""
    monkeypatch.setenv("XDG_STATE_HOME", "/home/me/state")
    (tmp_path / "var_tmp").mkdir()
    return tmp_path / "var_tmp"


def test_what_is_in_var_tmp_is_for_its_owner_alone(var_tmp: Path) -> None:
    uris = {default_uri(Path("/home/me/studies"), MOUNTS, var_tmp) for _again in range(2)}

    (made,) = var_tmp.iterdir()
    assert made.name == f"shardsweep-{os.getuid()}"
    assert made.stat().st_mode & 0o777 == 0o700
    assert [uri.startswith(f"sqlite:///{made}/mlflow-") for uri in uris] == [True]


SQUATTERS: dict[str, Callable[[Path], object]] = {
    "is a symbolic link": lambda path: path.symlink_to(path.parent),
    "is a symbolic link to nowhere": lambda path: path.symlink_to(path.parent / "none"),
    "is no directory": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("what", SQUATTERS)
def test_what_somebody_put_there_first_is_refused(what: str, var_tmp: Path) -> None:
    path = var_tmp / f"shardsweep-{os.getuid()}"
    SQUATTERS[what](path)

    with pytest.raises(TrackingError) as caught:
        default_uri(Path("/home/me/studies"), MOUNTS, var_tmp)

    reason = what.removesuffix(" to nowhere")
    assert str(caught.value).startswith(f"{path} {reason}; set tracking.uri=sqlite:////absolute/path/")
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in var_tmp.iterdir()] == [path.name]


def test_a_directory_of_another_user_is_refused(var_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    (var_tmp / f"shardsweep-{me + 1}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)

    with pytest.raises(TrackingError, match=r"belongs to another user; set tracking\.uri="):
        default_uri(Path("/home/me/studies"), MOUNTS, var_tmp)


def test_a_var_tmp_that_cannot_be_written_is_said_in_one_line(var_tmp: Path) -> None:
    with pytest.raises(TrackingError, match=r"cannot be created: No such file .*; set tracking\.uri="):
        default_uri(Path("/home/me/studies"), MOUNTS, var_tmp / "none")


def test_a_studies_directory_reached_by_a_link_is_where_the_link_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/scratch/me")
    mounts = f"{MOUNTS}tmp {tmp_path}/state tmpfs rw 0 0\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        assert default_uri(tmp_path / "link", mounts).startswith(f"sqlite:///{tmp_path}/state/shardsweep/")


def test_this_host_is_asked_for_its_mounts(tmp_path: Path) -> None:
    assert default_uri(tmp_path).startswith("sqlite:////")


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with its programs on the PATH."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


@pytest.mark.usefixtures("activated")
def test_the_command_to_paste_names_the_database() -> None:
    assert ui_command("sqlite:////a/mlflow.db") == "mlflow ui --backend-store-uri sqlite:////a/mlflow.db"
    assert ui_command("sqlite:////a b/m.db", port=5001) == (
        "mlflow ui --backend-store-uri 'sqlite:////a b/m.db' --port 5001"
    )


def test_the_command_names_the_program_where_it_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    program = shlex.split(ui_command("sqlite:////a/mlflow.db"))[0]

    assert program == str(Path(sys.executable).with_name("mlflow"))


def test_a_server_needs_no_command() -> None:
    assert ui_command("https://me:secret@host/mlflow/") == "https://host/mlflow"


def test_the_link_carries_our_columns_only_where_mlflow_is_known_to_take_them() -> None:
    page = "http://127.0.0.1:5000/#/experiments/3/runs"
    view = "?workflowType=machine_learning&viewStateShareKey=shardsweep"

    assert runs_url("sqlite:////a/mlflow.db", "3", "3.17.2") == page + view
    assert runs_url("sqlite:////a/mlflow.db", "3", "3.20.0") == page
    assert runs_url("https://host/x", "3", "3.17.0") == f"https://host/x/#/experiments/3/runs{view}"


def test_the_table_begins_with_throughput_memory_and_loss() -> None:
    state = json.loads(json.loads(shared_view(study_record("s")))["state"])

    assert state["columnOrder"] == [
        "metrics.`tokens_per_s_per_gpu`",
        "metrics.`peak_gib`",
        "metrics.`loss`",
        "metrics.`step_s`",
        "tags.`strategy`",
        "tags.`state`",
        "params.`micro_batch`",
    ]
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`tokens_per_s_per_gpu`", False)


def test_the_table_is_sorted_by_the_throughput_that_is_the_objective() -> None:
    study = dataclasses.replace(study_record("s"), goals=(Goal(name="tokens_per_s"),))

    state = json.loads(json.loads(shared_view(study))["state"])

    assert state["orderByKey"] == state["columnOrder"][0] == "metrics.`tokens_per_s`"


def test_a_goal_that_is_the_better_the_less_it_is_is_sorted_ascending() -> None:
    goal = Goal(name="time_to_tokens", tokens=1e9)
    study = dataclasses.replace(study_record("s"), goals=(goal, Goal(name="peak_bytes")))

    state = json.loads(json.loads(shared_view(study))["state"])

    assert state["columnOrder"][:5] == [
        "metrics.`time_to_tokens_s`",
        "metrics.`peak_gib`",
        "metrics.`tokens_per_s_per_gpu`",
        "metrics.`loss`",
        "metrics.`step_s`",
    ]
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`time_to_tokens_s`", True)


def test_a_model_that_is_divided_shows_its_degrees_and_what_they_cost() -> None:
    plan = a_plan(ranks=8, tensor=2, pipeline=2)  # 4 micro-batches
    trial = dataclasses.replace(measured(0, bubble=0.25, tensor_volume_bytes=1024), plan=plan)

    content = run_content(trial, None)

    assert {content.params[f"plan.{degree}"] for degree in ("tensor", "pipeline", "data")} == {"2"}
    assert (content.metrics["bubble_expected"], content.metrics["bubble"]) == (0.2, 0.25)
    assert content.metrics["tensor_volume_bytes"] == 1024


def test_a_bubble_that_was_not_measured_has_no_metric() -> None:
    trial = dataclasses.replace(measured(0), plan=a_plan(pipeline=2))

    metrics = run_content(trial, None).metrics

    assert "bubble_expected" in metrics
    assert metrics.keys().isdisjoint({"bubble", "tensor_volume_bytes"})


def test_what_was_expected_stands_beside_what_was_measured() -> None:
    content = run_content(dataclasses.replace(measured(0), estimate=an_estimate()), None)

    found = {name: value for name, value in content.metrics.items() if name.startswith("estimated_")}
    assert found == {
        "estimated_peak_bytes": 33 * 2**30 // 10,
        "estimated_step_s": 0.3,
        "estimated_tokens_per_s": 20_000.0,
    }
    assert content.tags["fit"] == "fits"
    assert "fit" not in run_content(measured(0), None).tags


def test_a_plan_that_was_not_launched_is_a_failed_run_with_its_estimate_alone() -> None:
    content = run_content(a_refused_trial(4), None)

    assert (content.name, content.status, content.artifacts) == ("0004 zero2", "FAILED", {})
    named = {name: content.tags[name] for name in ("state", "fit", "failure", "failure_message")}
    why = "not launched: needs 50.00 GiB (first_step) of 40.00 GiB, H100"
    assert named == {
        "state": "infeasible",
        "fit": "too_large",
        "failure": "infeasible",
        "failure_message": why,
    }
    assert (content.metrics["estimated_peak_bytes"], content.metrics["gpu_s"]) == (45 * 2**30, 0.0)
    assert "peak_gib" not in content.metrics
    assert content.params["plan.micro_batch"] == "4"


def test_a_study_of_pipelines_has_a_column_for_the_bubble() -> None:
    study = dataclasses.replace(study_record("s"), dimensions={"pipeline": "choice(1,2)"})

    state = json.loads(json.loads(shared_view(study))["state"])

    assert state["columnOrder"][3:5] == ["metrics.`step_s`", "metrics.`bubble`"]
    assert state["columnOrder"][-1] == "params.`pipeline`"


def test_columns_are_names_that_runs_really_have() -> None:
    content = run_content(measured(0), None)
    kinds = {"metrics": content.metrics, "tags": content.tags, "params": content.params}

    columns = json.loads(json.loads(shared_view(study_record("s")))["state"])["columnOrder"]

    assert all(name.strip("`") in kinds[kind] for kind, name in (column.split(".", 1) for column in columns))


@pytest.mark.parametrize(
    ("uri", "masked"),
    [
        ("postgresql://me:p@ss@host:5/db", "postgresql://me:***@host:5/db"),
        ("https://me:secret@host/mlflow", "https://me:***@host/mlflow"),
        ("mysql://host/db?password=secret&x=1", "mysql://host/db?password=***&x=1"),
        ("https://host/a:b@c", "https://host/a:b@c"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
    ],
)
def test_passwords_are_masked(uri: str, masked: str) -> None:
    assert mask_password(uri) == masked
    assert mask_password(uri, f"no route to {uri}") == f"no route to {masked}"


def test_a_password_is_masked_decoded_too() -> None:
    assert mask_password("http://me:a%2Fb@host", "login me:a/b refused") == "login me:*** refused"
