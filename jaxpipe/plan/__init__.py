"""Plan: how a model's segments are grouped into stages. Knows capture and scheduling."""

from jaxpipe.plan.cost import flops_costs
from jaxpipe.plan.group import balance, describe, group

__all__ = ["balance", "describe", "flops_costs", "group"]
