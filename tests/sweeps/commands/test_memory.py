"""`python -m sweeps memory`: an article's account of memory, checked by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sweeps.__main__ import main
from sweeps.commands import machines
from sweeps.commands.memory import Account, bytes_a_parameter, memory_lines, plain_account
from sweeps.config.compose import register_resolvers
from sweeps.errors import ConfigError
from tests.support.examples import a_plan
from tests.support.paths import ROOT
from train_entry.contract import Engine, Offload, OffloadPlan, Precision

COUNT = 13_015_864_320  # llama_13b
GIB = 2**30
TINY = ("memory", "model=tiny_llama", "strategy=zero2", "ranks=2")


@pytest.fixture(autouse=True)
def resolver() -> Iterator[None]:
    """Restore the resolver that other tests need: the command registers one for the actual machine."""
    yield
    register_resolvers(lambda: False)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "find_gpus", lambda: ())


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def rows(text: str) -> dict[tuple[str, int], list[str]]:
    """Return the other cells of each row by (strategy, GPUs)."""
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines() if re.match(r"\w+ +\d+ +[\d,]+\.", line)]
    return {(line[0], int(line[1])): line[2:] for line in lines}


@pytest.fixture(scope="module")
def article() -> str:
    """The command's whole output for llama_13b, computed once."""
    return "\n".join(memory_lines(["model=llama_13b"], "H100", None))


def test_13_billion_parameters_have_208_gb_of_states(article: str) -> None:
    assert "llama_13b: 13,015,864,320 parameters; bf16, micro_batch=1, seq_len=2048" in article
    assert "16 bytes a parameter = 2 weights + 2 gradients + 12 optimizer states" in article
    assert "optimizer 156.19 GB (145.46 GiB) = 208.25 GB (193.95 GiB)" in article


def test_every_strategy_has_a_row_for_each_number_of_gpus(article: str) -> None:
    found = rows(article)
    whole = {"ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
    counts = (1, 2, 4, 8, 16, 32, 64)
    assert {(name, count) for name in whole for count in counts} <= set(found)
    assert [count for name, count in found if name == "tp2_pp2_zero1"] == [4, 8, 16, 32, 64]
    assert [count for name, count in found if name == "pp2_zero1"] == [2, 4, 8, 16, 32, 64]


def test_plain_states_are_divided_as_the_article_says(article: str) -> None:
    found = rows(article)
    assert found["ddp", 8][:4] == ["24.24", "24.24", "145.46", "193.95"]
    assert found["zero1", 8][:4] == ["24.24", "24.24", "18.18", "66.67"]
    assert found["zero2", 8][:4] == ["24.24", "3.03", "18.18", "45.46"]
    assert found["zero3", 8][:4] == ["3.03", "3.03", "18.18", "24.24"]
    assert found["zero3", 64][3] == "3.03"  # 16 / 64 = 0.25 bytes a parameter


def test_what_fits_on_the_card_is_said_row_by_row_and_in_short(article: str) -> None:
    found = rows(article)
    assert [found["zero3", count][7] for count in (2, 4, 8)] == ["too large", "fits", "fits"]
    assert "needed\n" not in article
    assert "of 80.00" in article
    (short,) = [line for line in article.splitlines() if line.startswith("fewest GPUs that fit: ")]
    assert "ddp none" in short
    assert "zero3 4" in short


def test_the_peak_is_larger_than_the_plain_states_of_zero3(article: str) -> None:
    plain, peak, needed = (float(rows(article)["zero3", 8][at]) for at in (3, 5, 6))
    assert plain < peak < needed


# ---------------------------------------------------------------- the plain account

HALF = {"precision": Precision.BF16, "ranks": 8}


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({"zero": {"stage": 0}}, (2, 2, 12)),
        ({"zero": {"stage": 1}}, (2, 2, 12 / 8)),
        ({"zero": {"stage": 2}}, (2, 2 / 8, 12 / 8)),
        ({"zero": {"stage": 3}}, (2 / 8, 2 / 8, 12 / 8)),
        ({"zero": {"stage": 2}, "offload": OffloadPlan(optimizer=Offload.CPU)}, (2, 0, 0)),
        (
            {"zero": {"stage": 3}, "offload": OffloadPlan(optimizer=Offload.CPU, param=Offload.CPU)},
            (0, 0, 0),
        ),
        ({"zero": {"stage": 1}, "tensor": 2, "pipeline": 2}, (2 / 4, 2 / 4, 12 / 4 / 2)),
    ],
)
def test_bytes_a_parameter_on_one_gpu(changes: dict[str, object], shares: tuple[float, ...]) -> None:
    found = plain_account(a_plan(**HALF, **changes), COUNT)  # type: ignore[arg-type]
    weights, gradients, optimizer = (share * COUNT for share in shares)
    assert found == Account(weights=weights, gradients=gradients, optimizer=optimizer)


def test_in_fp32_there_is_no_second_copy_of_the_weights() -> None:
    plan = a_plan(engine=Engine.DEEPSPEED, precision=Precision.FP32)
    assert bytes_a_parameter(plan) == (4, 4, 8)


def test_sgd_without_momentum_keeps_the_fp32_weights_alone() -> None:
    assert bytes_a_parameter(a_plan(optimizer={"name": "sgd", "momentum": 0.0})) == (2, 2, 4)


# ---------------------------------------------------------------- GPUs


def test_without_a_gpu_it_is_an_h100_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *TINY)
    assert "GPU: H100, 80.00 GiB, 8 a node (there is no GPU here; --card and --memory-gib choose" in text


@pytest.mark.parametrize(
    ("name", "size_gib"), [("H100", 80.0), ("h200", 139.8), ("A100-80GB", 80.0), ("A100-40GB", 40.0)]
)
def test_a_card_has_the_memory_its_name_says(name: str, size_gib: float) -> None:
    gpu = machines.named_gpu(name, None)
    assert gpu.memory_bytes == round(size_gib * GIB)
    assert gpu.capability == (8, 0)


def test_memory_may_be_given_for_any_card(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *TINY, "--card", "RTX 6000", "--memory-gib", "48")
    assert "GPU: RTX 6000, 48.00 GiB" in text
    assert "RTX 6000 is not known here: figures of a similar GPU" in text


def test_a_card_without_bf16_trains_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    assert "parameters; fp16, " in printed(capsys, *TINY, "--card", "V100")


def test_an_unknown_card_needs_its_memory() -> None:
    with pytest.raises(ConfigError, match="--card RTX 6000: not known here; add --memory-gib N, or"):
        machines.named_gpu("RTX 6000", None)


# ---------------------------------------------------------------- the command line


def test_overrides_may_stand_behind_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "memory", "model=tiny_llama", "--card", "H100", "strategy=zero2", "ranks=2")
    assert list(rows(text)) == [("zero2", 2)]


def test_a_global_batch_that_the_ranks_do_not_divide_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "memory", "model=tiny_llama", "strategy=zero2", "micro_batch=4")
    assert list(rows(text)) == [("zero2", count) for count in (1, 2, 4, 8, 16, 32, 64)]
    assert (
        "global_batch=16 is no multiple of micro_batch x data degree everywhere; there it is 32 to 256"
        in text
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["micro_batch=0"], "micro_batch: 0 is too small"),
        (["model=llama_14b"], "model=llama_14b: no such choice; there are"),
        (["model=hf"], "model.path: is not set"),
        (["seq_len=1024,2048"], "Ambiguous value for argument"),
        (["strategy=zero2", "ranks=2", "seq_len=99999"], "is longer than the"),
        (["--memory-gib", "0"], "--memory-gib 0: give a finite number above 0"),
        (["--memory-gib", "nan"], "--memory-gib nan: give a finite number above 0"),
        (["--memory-gib", "inf"], "--memory-gib inf: give a finite number above 0"),
        (["--memory-gib", "1e308"], "--memory-gib 1e+308: give a finite number above 0"),
        (["cluster.memory_limit_gib=200"], "cluster.memory_limit_gib=200: H100 has 80.0 GiB; null uses all"),
        (["cluster.memory_limit_gib=0.5"], "cluster.memory_limit_gib=0.5: CUDA's context alone takes"),
        (["gate.headroom_gib=80"], "gate.headroom_gib=80: H100 has 80.0 GiB, so no memory would be left"),
        (["cluster.device=cpu"], "cluster.device=cpu: this table is about GPUs"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", *overrides]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error


def test_a_memory_of_nothing_is_refused_beside_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machines.named_gpu("H200", None)
    monkeypatch.setattr(machines, "find_gpus", lambda: (here,))
    with pytest.raises(ConfigError, match="--memory-gib 0: give a finite number above 0"):
        machines.chosen_gpu(None, 0)


def left_out(text: str, preset: str) -> list[str]:
    return [line.split(": ", 2)[2] for line in text.splitlines() if line.startswith(f"left out: {preset}: ")]


def test_a_preset_that_is_left_out_names_each_rule_it_breaks_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "memory", "model=gpt2_124m")
    family, ranks = left_out(text, "hybrid_3d")
    assert family.startswith("tensor=2: matrices of gpt2_124m, a gpt2 model, cannot be split")
    assert ranks.startswith("tensor=2 x pipeline=2 does not divide ranks=2")
    assert ranks.endswith(" (on 1 or 2 GPUs)")


def test_of_one_number_of_gpus_all_reasons_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["strategy=zero2", "ranks=2", "seq_len=99999", "zero.offload_param=cpu"]
    assert main(["memory", "model=tiny_llama", *overrides]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 2
    assert "is longer than the" in error
    assert "zero.offload_param=cpu" in error


@pytest.mark.slow
def test_a_reader_that_has_read_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "sweeps", *TINY]
    shown = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shown.stdout is not None
    shown.stdout.close()
    assert shown.stderr is not None
    assert shown.stderr.read() == b""
    shown.stderr.close()
    assert shown.wait(timeout=60) == 0


def test_an_option_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["memory", "--crd", "H100"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --crd" in capsys.readouterr().err
