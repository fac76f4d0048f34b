from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from train_entry.contract import DataSpec, Plan, TrialSpec
from train_entry.data import Tokens, Windows, load_tokens, micro_batches

EPOCHS_AND_A_BIT = 9  # steps; an epoch of the tokens below has 4


@pytest.fixture
def tokens(spec: TrialSpec) -> Tokens:
    """Return windows that hold their own number. The last three fill no global batch and are left out."""
    windows = 4 * spec.plan.global_batch + 3
    return np.repeat(np.arange(windows), spec.plan.seq_len).astype(np.uint32)


def samples_by_step(tokens: Tokens, plan: Plan) -> list[set[int]]:
    """Return the windows that all ranks together see in each global step."""
    steps: list[set[int]] = [set() for _ in range(EPOCHS_AND_A_BIT)]
    for rank in range(plan.data):
        batches = micro_batches(Windows(tokens, plan), plan, rank)
        for number, batch in enumerate(islice(batches, EPOCHS_AND_A_BIT * plan.grad_accum)):
            steps[number // plan.grad_accum].update(batch[:, 0].tolist())
    return steps


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_a_global_step_sees_the_same_samples_however_they_are_split(
    spec: TrialSpec, tokens: Tokens, ranks: int, micro_batch: int
) -> None:
    alone = dataclasses.replace(spec.plan, ranks=1, micro_batch=8)
    fitting = min(micro_batch, spec.plan.global_batch // ranks)
    plan = dataclasses.replace(spec.plan, ranks=ranks, micro_batch=fitting)
    assert samples_by_step(tokens, plan) == samples_by_step(tokens, alone)


def test_every_epoch_shows_each_sample_once_and_in_a_new_order(spec: TrialSpec, tokens: Tokens) -> None:
    steps = samples_by_step(tokens, spec.plan)
    assert set().union(*steps[:4]) == set().union(*steps[4:8])
    assert sum(len(step) for step in steps[:4]) == 4 * spec.plan.global_batch
    assert steps[:4] != steps[4:8]


def test_another_seed_is_another_order(spec: TrialSpec, tokens: Tokens) -> None:
    other = dataclasses.replace(spec.plan, seed=spec.plan.seed + 1)
    assert samples_by_step(tokens, other) != samples_by_step(tokens, spec.plan)


def test_too_little_text_is_refused_with_numbers(spec: TrialSpec) -> None:
    with pytest.raises(ValueError, match=r"has 255 tokens.* 8 x 32 = 256"):
        Windows(np.zeros(255, dtype=np.uint8), spec.plan)


def load(spec: TrialSpec, data: DataSpec, vocab: int = 256) -> Tokens:
    return load_tokens(data, dataclasses.replace(spec.model, vocab=vocab), seed=1, on_progress=lambda: None)


def test_the_standard_library_is_read_up_to_the_limit(spec: TrialSpec) -> None:
    tokens = load(spec, DataSpec(kind="stdlib", max_bytes=100_000))
    assert len(tokens) == 100_000
    assert b"import" in tokens.tobytes()


def test_a_directory_of_text_is_read_in_the_order_of_its_names(spec: TrialSpec, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first ")
    (tmp_path / "c.bin").write_text("never")
    assert load(spec, DataSpec(kind="text", path=str(tmp_path))).tobytes() == b"first second"


def test_ids_beyond_the_vocabulary_are_refused_saying_what_would_do(spec: TrialSpec, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes([7, 200]))
    with pytest.raises(ValueError, match=r"up to 200, .* has 128: .* model\.vocab=201"):
        load(spec, DataSpec(kind="text", path=str(tmp_path)), vocab=128)


def test_synthetic_ids_cover_the_vocabulary_and_repeat(spec: TrialSpec) -> None:
    tokens = load(spec, DataSpec(kind="synthetic"), vocab=300)
    assert (tokens.min(), tokens.max()) == (0, 299)
    assert np.array_equal(tokens, load(spec, DataSpec(kind="synthetic"), vocab=300))


def test_a_local_tokenizer_makes_the_tokens(spec: TrialSpec, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "tok")
    (tmp_path / "a.txt").write_text("one two three one")
    data = DataSpec(kind="text", path=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tok"))
    assert load(spec, data).tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (DataSpec(kind="web"), "it must be stdlib, text or synthetic"),
        (DataSpec(kind="text"), "set data.path"),
        (DataSpec(kind="text", path="/nowhere"), "/nowhere does not exist"),
    ],
)
def test_data_that_cannot_be_found_is_refused(spec: TrialSpec, data: DataSpec, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(spec, data)
