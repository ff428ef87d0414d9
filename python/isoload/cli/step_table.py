"""The second table of ``isoload advise``: a whole step by its stages, as it runs now and as the best would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoload.cli.tables import Column

if TYPE_CHECKING:
    from isoload.advise.steps import Step

WHOLE = (
    "Percentages are of a whole step that is modelled: these layers and {dense:g} ms for attention and the dense part, "
    "as --dense-ms says, one after the other; scheduling and sampling are not in it. --step-ms takes a measured one. "
    "Stages are those of a rank in the mean; waiting is for slower ranks. In two halves: half a batch computes while "
    "the other exchanges, as SGLang's two-batch overlap orders prefill, and neither slows the other."
)


def span_of(ends: tuple[float, float], sign: str = "") -> str:
    """Milliseconds or percent: two digits behind the point of what is below 100."""
    low, high = (format(end, f"{sign}.{0 if max(map(abs, ends)) >= 100 else 2}f") for end in ends)
    return low if low == high else f"{low} .. {high}"


def step_columns(now: Step, best: Step) -> list[Column]:
    """A row for each stage that takes any time."""
    shown = [name for name in now.stages if any((*now.stages[name], *best.stages[name]))]

    def cells(step: Step) -> list[str]:
        return [*(span_of(step.stages[name]) for name in shown), span_of(step.ms), span_of(step.halved_ms)]

    group, stages = "ms, a rank in the mean", Column("", "stage", [*shown, "a whole step", "in two halves"])
    return [stages, Column(group, "now", cells(now)), Column(group, "best", cells(best))]
