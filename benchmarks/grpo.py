"""TRL's GRPO as the benchmarks run it: on a CPU in float32, one optimiser step for each round of completions."""

from __future__ import annotations

from typing import Any


def grpo_config(folder: str, samples: int, completions: int, batch: int, **settings: Any) -> Any:
    """A ``GRPOConfig`` with ``samples`` a prompt and ``completions`` a step, the gradient in passes of ``batch``.

    Nothing is logged or saved; the rate is constant.
    """
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        num_generations=samples,
        generation_batch_size=completions,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=-(-completions // batch),
        temperature=1.0,
        num_iterations=1,
        gradient_checkpointing=False,
        lr_scheduler_type="constant",
        max_steps=10**6,
        use_cpu=True,
        bf16=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
