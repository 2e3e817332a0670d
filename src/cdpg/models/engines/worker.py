"""What runs inside vLLM's workers: ``--worker-extension-cls cdpg.models.engines.worker.LoadsWeights``.

vLLM loads new weights layer by layer, and prepares each layer that got some. An output layer that is tied to the
embeddings gets none. On a GPU it reads the embeddings' own numbers. On a CPU it has a copy, packed for its kernels when
the model was first loaded, and would keep using the first weights.
"""

from __future__ import annotations

from typing import Any

METHOD = "cdpg_load"
"""The name of the method below, for ``/collective_rpc``."""


class LoadsWeights:
    """Added to the bases of vLLM's worker."""

    def cdpg_load(self, weights_path: str) -> None:
        """Load the weights of a folder into every layer, tied ones included."""
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        seen: set[int] = set()
        for layer in worker.get_model().modules():
            weight = getattr(layer, "weight", None)
            prepare = getattr(getattr(layer, "quant_method", None), "process_weights_after_loading", None)
            if weight is None or prepare is None:
                continue
            if id(weight) in seen or (weight.numel() and weight.data_ptr() in seen):
                prepare(layer)
            seen |= {id(weight), weight.data_ptr()}
