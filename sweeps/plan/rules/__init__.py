"""All rules of a legal plan. All rules that a configuration breaks are reported at once."""

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
