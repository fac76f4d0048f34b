"""The ways a configuration makes no legal plan. One rule each; all that are broken are reported at once."""

from sweeps.plan.rules import batch, model, offload, parallel, precision, zero
from sweeps.plan.rules.base import Draft, Rule

RULES: tuple[Rule, ...] = (
    *batch.RULES,
    *parallel.RULES,
    *zero.RULES,
    *offload.RULES,
    *precision.RULES,
    *model.RULES,
)

__all__ = ["RULES", "Draft", "Rule"]
