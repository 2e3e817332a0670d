"""Samples that are replayed keep the values of moments and rewards, and meet their present coefficients."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import torch

from cdpg import CDPGConfig
from cdpg.methods.cdpg import CDPG
from cdpg.rollout.replay import ReplayBuffer
from cdpg.system.distributed import Processes
from cdpg.training.nonfinite import keep_refused
from cdpg.training.optimization import Batch, RefusedStep, StepSummary
from cdpg.training.replay import Replay
from enumeration import contexts_of
from side_by_side import side_by_side
from uneven import VALID, B, M, N, table, uneven_epoch

COEFFICIENTS = (2.0, -0.5)


def refused(batch: Batch) -> RefusedStep:
    return RefusedStep(batch.rollout, batch.rows, math.nan, math.nan, None, weights_finite=True, replayed=True)


def test_replayed_samples_have_the_target_of_the_present_coefficients(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(N, M, 2, generator=generator, dtype=torch.float64)
    satisfying = torch.from_numpy((B > 0) & VALID)
    given = features.where(satisfying[..., None], torch.tensor(math.nan))  # unknown where the constraint fails
    epoch = replace(
        uneven_epoch(table(1), table(2)),
        indices=tuple(range(N)), features=given, coefficients=(1.0, 1.0), factor_names=("one", "other"),
    )  # fmt: skip

    def work(processes: Processes) -> None:
        buffer = ReplayBuffer(1000).add(epoch, processes)
        assert torch.equal(buffer.tables["features"], features.where(satisfying[..., None], torch.tensor(0.0).double()))
        buffer = ReplayBuffer(1000).restored(buffer.tensors())
        config = CDPGConfig(replay=1)
        prompts = [(number,) for number in range(N)]
        replay = Replay(buffer, 1, CDPG(config), contexts_of(3) * 2, prompts, config, processes, COEFFICIENTS)
        (batch,) = replay.batches(epoch, {})
        (context,) = batch.rollout.indices
        tilt = (features[context] * torch.tensor(COEFFICIENTS, dtype=torch.float64)).sum(dim=1)
        expected = (epoch.log_a + epoch.b.log() - epoch.log_q)[context] + tilt
        found = batch.rollout.log_ratio[0]
        assert torch.allclose(found[satisfying[context]], expected[satisfying[context]], rtol=1e-12)
        assert bool((found[~satisfying[context]] == -math.inf).all())
        # The record of a step that is refused has them by name.
        values = batch.rollout.by_factor()
        assert list(values) == ["one", "other"]
        kept = features[context].where(satisfying[context][:, None], torch.tensor(0.0).double())
        assert torch.equal(torch.stack([*values.values()], dim=2)[0], kept)
        summary = StepSummary(None, None, 0, 0, refused=(refused(batch),))
        written = keep_refused(tmp_path, batch.rollout, summary)
        assert written is not None
        samples = json.loads(written.read_text())["steps"][0]["samples"]
        assert [sample["one"] for sample in samples] == features[context][satisfying[context]][:, 0].tolist()

    side_by_side(1, work)
