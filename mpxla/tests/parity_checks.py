"""What has to hold for every training on several ranks, whatever the model and the schedule."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mpxla.tests.parity import Case, Observed, Reference
from mpxla.tests.tolerances import (
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    ROUNDING,
    assert_close_by_norm,
)

__all__ = ["assert_parity", "assert_promises", "merge"]


def assert_parity(observed: Sequence[Observed], reference: Reference) -> None:
    """The numbers are those of the plain model, on every rank that has them."""
    for rank, found in enumerate(observed):
        assert found.adam_losses == pytest.approx(reference.adam_losses, rel=LOSS), f"rank {rank}"
        assert found.adam_losses == observed[0].adam_losses, f"rank {rank}"
        _assert_outputs(found.outputs, reference.outputs)
    gradients = merge([found.gradients for found in observed])
    assert_close_by_norm(gradients, reference.gradients, GRADIENT, floor=ROUNDING)
    state = merge([found.state for found in observed])
    assert_close_by_norm(state, reference.state, PARAMETER, floor=ROUNDING)


def merge(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What all ranks hold together; what several hold is equal bit for bit."""
    merged: dict[str, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        for name, value in part.items():
            if name in merged:
                assert torch.equal(merged[name], value), f"rank {rank} holds another {name}"
            merged[name] = value
    return merged


def _assert_outputs(actual: list[list[Any]], expected: list[list[Any]]) -> None:
    assert len(actual) == len(expected)
    for leaf, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert len(got) == len(want)
        for mb, (a, b) in enumerate(zip(got, want, strict=True)):
            if isinstance(b, torch.Tensor):
                assert_close_by_norm({f"{leaf}[{mb}]": a}, {f"{leaf}[{mb}]": b}, OUTPUT)
            else:
                assert a == b, (leaf, mb)


def assert_promises(case: Case, observed: Sequence[Observed]) -> None:
    """No compilation after the first step, bounded memory, parameters where they belong."""
    for rank, found in enumerate(observed):
        assert found.later_compilations == 0, f"rank {rank}"
        assert found.absent == sorted(
            set(found.names) - set(found.gradients), key=found.names.index
        )
        local = [stage for stage, owner in enumerate(found.placement) if owner == rank]
        assert set(found.peaks) <= set(local)
        for stage, peak in found.peaks.items():
            assert peak <= _bound(case, found.placement, stage), f"rank {rank}, stage {stage}"
    if not case.manual:
        assert observed[0].placement == tuple(range(case.stages))


def _bound(case: Case, placement: tuple[int, ...], stage: int) -> int:
    """Most microbatches that may be in flight at a stage."""
    if case.pipeline == "simple":
        return case.microbatches
    active = min(case.microbatches, case.stages + 2)
    if placement == tuple(range(len(placement))):
        return min(active, len(placement) - stage)
    return active
