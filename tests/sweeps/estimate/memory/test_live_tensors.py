"""The backward pass of a block is counted as torch allocates it: a small model, on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sweeps.estimate.memory.activations import saved
from tests.support.examples import a_model, a_plan
from train_entry.contract import Engine, Precision
from train_entry.model.build import build_model, parameters_of
from train_entry.model.stages import Absent

BATCH, TOKENS = 4, 256
LLAMA = a_model(
    layers=2, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=64, positions=256, tied_embeddings=False
)


def allocated(profiled: Any) -> tuple[int, int]:
    """Return the bytes at the end of the forward pass, and at most in the backward pass."""
    events = profiled.profiler.kineto_results.events()  # torch has no public interface for single allocations
    begins = next(event.start_ns() for event in events if event.name() == "backward")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = kept = peak = 0
    for at, change in changes:
        live += change
        kept = live if at < begins else kept
        peak = max(peak, live) if at >= begins else peak
    return kept, peak


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
def test_a_block_takes_this_much_when_it_is_gone_through_backward(every: int) -> None:
    """A recomputed block exists once more as a whole, the next one not yet."""
    plan = a_plan(
        engine=Engine.DEEPSPEED,
        precision=Precision.BF16,
        ranks=1,
        micro_batch=BATCH,
        global_batch=BATCH,
        seq_len=TOKENS,
        checkpoint_every=every,
    )
    model = build_model(LLAMA, plan, torch.device("cpu")).bfloat16()
    shape = dataclasses.replace(LLAMA, parameters=parameters_of(model))
    model.base_model.norm = Absent()
    ids = torch.randint(0, shape.vocab, (BATCH, TOKENS))
    gradient = torch.ones(BATCH, TOKENS, shape.hidden, dtype=torch.bfloat16)
    model.base_model(input_ids=ids).last_hidden_state.backward(gradient)  # weights have gradients from now on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        output = model.base_model(input_ids=ids).last_hidden_state
        with record_function("backward"):
            output.backward(gradient)
    kept, peak = allocated(profiled)
    counted = saved(plan, shape)
    assert peak - kept == pytest.approx(counted.backward + (counted.block if every else 0), rel=0.01)
