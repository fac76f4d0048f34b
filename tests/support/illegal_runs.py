"""Run DeepSpeed with configurations that the rules refuse. test_illegal_runs.py starts two ranks of this.

Each case is a DeepSpeed configuration. All cases run one after another in the same processes. Rank 0 writes a
JSON file with each case's losses, gradient norms and norm of the first update, or its exception.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from train_entry.rank import RankInfo, prepare_process

UPDATES = 3
ACCUMULATION = 2
WIDTH = 64


class Net(torch.nn.Module):
    """Three layers and a loss: enough to show an optimizer's mistakes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(16, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)
        self.outer = torch.nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = self.outer(torch.tanh(self.middle(torch.tanh(self.inner(inputs)))))
        loss: torch.Tensor = (outputs.float() - targets).square().mean()
        return loss


def run(document: dict[str, Any]) -> dict[str, Any]:
    """Train a few updates with this DeepSpeed configuration, and return what was seen."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=Net(), config=document)
    dtype = next(engine.module.parameters()).dtype
    source = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses: list[float] = []
    norms: list[float | None] = []
    before = [parameter.detach().float() for parameter in engine.module.parameters()]
    update = 0.0
    for _ in range(UPDATES):
        for _ in range(ACCUMULATION):
            inputs = torch.randn(4, 16, generator=source)
            loss = engine(inputs.to(dtype), inputs.sum(dim=1, keepdim=True))
            engine.backward(loss)
            engine.step()
        if not losses and document["zero_optimization"]["stage"] < 3:  # stage 3 leaves them empty
            after = [parameter.detach().float() for parameter in engine.module.parameters()]
            update = (
                sum(float((new - old).square().sum()) for new, old in zip(after, before, strict=True)) ** 0.5
            )
        total = loss.detach().float()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / 2)
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    seen = {"losses": losses, "norms": norms, "update": update, "optimizer": type(engine.optimizer).__name__}
    engine.destroy()
    return seen


def attempt(document: dict[str, Any]) -> dict[str, Any]:
    try:
        return run(document)
    except Exception as error:  # any exception is the case's answer
        return {"error": f"{type(error).__name__}: {error}"}


def main(cases: Path, answers: Path) -> None:
    warnings.simplefilter("ignore")
    where = RankInfo.from_env(os.environ, 2)
    prepare_process(where, "cpu")
    import torch._dynamo  # DeepSpeed's zero.Init patches tensors, which its lazy import does not survive
    from deepspeed.accelerator import get_accelerator

    from train_entry.engines.deepspeed import join_ranks

    # The cases test DeepSpeed's arithmetic in fp16, so they must run on a CPU without fp16 support too.
    get_accelerator().is_fp16_supported = lambda: True
    join_ranks("gloo", where)
    documents = json.loads(cases.read_text())
    seen = {}
    for name, document in documents.items():
        print(name, flush=True)  # the log then names a case that hangs
        seen[name] = attempt(document)
    if torch.distributed.get_rank() == 0:
        answers.write_text(json.dumps(seen))
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's clean-up at the interpreter's end can hang


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
