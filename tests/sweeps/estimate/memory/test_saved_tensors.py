"""Activations are counted as autograd saves them in real models: small ones, on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sweeps.estimate.memory.activations import saved
from tests.support.examples import a_model, a_plan
from train_entry.contract import Attention, Engine, ModelShape, Plan, Precision
from train_entry.model.build import build_model, parameters_of

BATCH, TOKENS = 2, 256
LLAMA = a_model(
    layers=1, hidden=256, heads=4, kv_heads=4, ffn=768, vocab=64, positions=256, tied_embeddings=False
)
GROUPED = dataclasses.replace(LLAMA, kv_heads=1)
GPT2 = dataclasses.replace(LLAMA, family="gpt2", ffn=1024, tied_embeddings=True)
HALF, FULL = Precision.BF16, Precision.FP32


def plan_of(engine: Engine, precision: Precision, attention: Attention) -> Plan:
    return a_plan(
        engine=engine,
        precision=precision,
        attention=attention,
        ranks=1,
        micro_batch=BATCH,
        global_batch=BATCH,
        seq_len=TOKENS,
    )


def saved_by_autograd(shape: ModelShape, plan: Plan) -> tuple[int, int]:
    """Return the bytes that a forward pass saves besides the parameters, and the number of parameters."""
    model = build_model(shape, plan, torch.device("cpu"))
    if plan.engine is Engine.DEEPSPEED and plan.precision is HALF:
        model = model.bfloat16()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.Tensor] = {}  # kept alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            seen[address] = tensor
        return tensor

    casts = plan.engine is Engine.DDP and plan.precision is HALF
    ids = torch.randint(0, shape.vocab, (plan.micro_batch, plan.seq_len))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts),
    ):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values()), parameters_of(model)


WAYS = [(engine, precision) for engine in (Engine.DEEPSPEED, Engine.DDP) for precision in (HALF, FULL)]
# Without gpt2 in half precision by autocast: it computes powers in fp32 on a GPU, but not on a CPU.
CASES = [
    pytest.param(shape, *way, id=f"{name}-{'-'.join(way)}")
    for name, shape in (("llama", LLAMA), ("grouped", GROUPED), ("gpt2", GPT2))
    for way in WAYS
    if (name, *way) != ("gpt2", Engine.DDP, HALF)
]


@pytest.mark.slow
@pytest.mark.parametrize("attention", [Attention.SDPA, Attention.EAGER])
@pytest.mark.parametrize(("shape", "engine", "precision"), CASES)
def test_a_block_keeps_what_autograd_saves(
    shape: ModelShape, engine: Engine, precision: Precision, attention: Attention
) -> None:
    plan = plan_of(engine, precision, attention)
    twice = dataclasses.replace(shape, layers=2)
    (more, all_of_two), (less, all_of_one) = [saved_by_autograd(each, plan) for each in (twice, shape)]
    block = more - less
    if engine is Engine.DDP and precision is HALF:  # cast matrices are counted apart
        block -= 2 * (all_of_two - all_of_one - 2 * shape.hidden)
    estimated = saved(plan, dataclasses.replace(shape, parameters=all_of_one)).block
    assert block == pytest.approx(estimated, rel=0.003)
