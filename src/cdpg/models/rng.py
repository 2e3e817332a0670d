"""Uniform random numbers from a counter-based generator.

Every token is drawn from one number that depends only on ``(seed, stream, epoch, slot, sample, position)``. So the
samples do not depend on the batch split or the number of processes, and a resumed run has no generator state to
restore.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_ROUNDS = 10


def philox4x32(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """The Philox 4x32-10 block function (Salmon et al., 2011): ``[..., 4]`` counters to ``[..., 4]`` 32-bit words."""
    c0, c1, c2, c3 = (counter[..., i] & _LOW for i in range(4))
    k0, k1 = key
    shift = np.uint64(32)
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product_1 >> shift) ^ c1 ^ np.uint64(k0),
            product_1 & _LOW,
            (product_0 >> shift) ^ c3 ^ np.uint64(k1),
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


@dataclass(frozen=True)
class UniformStream:
    """Uniform numbers in (0, 1) for one epoch of one stream (``train``, ``evaluation``, …)."""

    seed: int
    stream: str
    epoch: int

    def draw(
        self, slots: NDArray[np.int64], samples: NDArray[np.int64], position: int | NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """One number for each pair of context slot and sample index, at one token position or at one for each."""
        counter = np.empty((len(slots), 4), dtype=np.uint64)
        counter[:, 0], counter[:, 1], counter[:, 2], counter[:, 3] = self.epoch, slots, samples, position
        words = philox4x32(counter, self._key())
        # 52 bits plus one half: never 0, never 1, and exact in float64.
        bits = ((words[:, 0] << np.uint64(32)) | words[:, 1]) >> np.uint64(12)
        uniforms: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
        return uniforms

    def permutation(self, count: int) -> NDArray[np.int64]:
        """A permutation of ``range(count)``, the same on every machine."""
        keys = self.draw(np.arange(count), np.zeros(count, dtype=np.int64), position=0)
        return np.argsort(keys, kind="stable")

    def seed_of(self, slot: int) -> int:
        """A seed for another program's generator, one for each context slot; below 2⁶², so that it may count on."""
        digest = hashlib.sha256(f"{self.seed}/{self.stream}/{self.epoch}/{slot}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 2

    def _key(self) -> tuple[int, int]:
        digest = hashlib.sha256(f"{self.seed}/{self.stream}".encode()).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
