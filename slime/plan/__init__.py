"""The plan of a run: `make_plan` computes it from the flags, `render` writes it as text."""

from __future__ import annotations

from slime.plan.plan import EngineKind, Facts, HookReport, Plan, RowReport, make_plan

__all__ = ["EngineKind", "Facts", "HookReport", "Plan", "RowReport", "make_plan"]
