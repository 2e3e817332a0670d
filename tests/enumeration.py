"""Exact expectations over every sequence that a small model can produce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.methods.base import SampleLoss, WeightedLoss
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.loading import load_model
from cdpg.models.sampling import Samples
from cdpg.models.scoring import score_samples
from cdpg.models.tabular import TabularModel
from cdpg.rollout.rollout import Rollout
from cdpg.training.optimization import accumulate

LETTERS = ("a", "b", "c")
MAX_LENGTH = 3


def four_token_transformer(kind: str, seed: int) -> LanguageModel:
    """A real transformer over the end token and three letters, in float64."""
    tokenizer = Tokenizer(models.WordLevel({"<e>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<e>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "t5":
        tokenizer.post_processor = processors.TemplateProcessing(single="$A <e>", special_tokens=[("<e>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", pad_token="<e>")
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.6, eos_token_id=0,
                bos_token_id=None, pad_token_id=None,
            )
        )  # fmt: skip
    else:
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=4, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0,
                eos_token_id=0, pad_token_id=0, dropout_rate=0.5, initializer_factor=3.0,
            )
        )  # fmt: skip
    return load_model(model, CDPGConfig(device="cpu", dtype="float64"), fast)


class SharedTable(TabularModel):
    """A table that is the same for all contexts: what is learnt in one holds in the others."""

    def encode(self, contexts: Sequence[Context], max_length: int) -> list[PromptTokens]:
        return [(0,) for _ in contexts]


def shared(seed: int) -> SharedTable:
    """A table for contexts with any prompts."""
    return SharedTable(["a"], LETTERS, MAX_LENGTH, seed=seed)


def tabular(seed: int, contexts: int = 3) -> TabularModel:
    return TabularModel([" ".join(LETTERS[: i + 1]) for i in range(contexts)], LETTERS, MAX_LENGTH, seed=seed)


def contexts_of(count: int) -> list[Context]:
    """Contexts of different lengths, so that a transformer has to pad."""
    return [Context(prompt=" ".join(LETTERS[: i + 1]), columns={}, row=i + 1) for i in range(count)]


@dataclass(frozen=True)
class Universe:
    """Every outcome of some contexts as if each had been sampled once; tensors ``[context, outcome]``."""

    samples: Samples

    @classmethod
    def of(cls, model: LanguageModel, contexts: Sequence[Context]) -> Universe:
        end = next(iter(model.end_ids))
        letters = [1, 2, 3]
        ended = [(*word, end) for length in range(MAX_LENGTH) for word in product(letters, repeat=length)]
        outcomes = [*ended, *product(letters, repeat=MAX_LENGTH)]
        tokens = torch.tensor([[*o, *[0] * (MAX_LENGTH - len(o))] for o in outcomes])
        lengths = torch.tensor([len(o) for o in outcomes])
        prompts: list[PromptTokens] = model.encode(contexts, MAX_LENGTH)
        count = len(contexts)
        return cls(
            Samples(
                contexts=tuple(contexts),
                prompts=tuple(prompts),
                texts=tuple(tuple(model.decode(p, o) for o in outcomes) for p in prompts),
                tokens=tokens.expand(count, -1, -1).contiguous(),
                lengths=lengths.expand(count, -1).contiguous(),
                token_log_q=torch.zeros(count, len(outcomes), MAX_LENGTH, dtype=torch.float64),
                ended=(tokens == end).any(dim=1).expand(count, -1),
            )
        )

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.samples.lengths.numel())

    def log_prob(self, model: LanguageModel) -> Tensor:
        """log π(x|c) of every outcome, by the production scorer."""
        return score_samples(model, self.samples, self.rows, tokens_per_pass=1000).sum(dim=2)

    def differentiable_log_prob(self, model: LanguageModel) -> Tensor:
        """The same with a gradient, in one piece: what the exact loss is made of."""
        samples = self.samples
        return model.score(list(samples.prompts), samples.rows(self.rows)).log_prob().view(samples.shape)

    def satisfied(self, check: Callable[[str, str], bool]) -> Tensor:
        """b of every outcome."""
        table = [
            [float(check(str(c.prompt), t)) for t in texts]
            for c, texts in zip(self.samples.contexts, self.samples.texts, strict=True)
        ]
        return torch.tensor(table, dtype=torch.float64)

    def epoch(self, b: Tensor, log_q: Tensor, log_a: Tensor, valid: Tensor | None = None) -> Rollout:
        """The record that the production methods take."""
        return Rollout(
            number=1, b=b, valid=torch.ones_like(b, dtype=torch.bool) if valid is None else valid,
            failed=torch.zeros_like(b, dtype=torch.bool), log_q=log_q, log_a=log_a,
            lengths=self.samples.lengths, samples=self.samples,
            token_log_a=torch.zeros_like(self.samples.token_log_q), first_context=0,
        )  # fmt: skip

    def gradient(self, model: LanguageModel, coefficients: Tensor, tokens_per_pass: int = 300) -> Tensor:
        """−mean_c Σ_x coefficient(x,c) ∇log π(x|c), by the production loss and accumulation."""
        epoch = self.epoch(coefficients, torch.zeros_like(coefficients), torch.zeros_like(coefficients))
        loss = WeightedLoss(epoch, coefficients, follows_policy=False, subtracts_control_variate=False)
        return self.gradient_of(model, loss, epoch, tokens_per_pass)

    def gradient_of(self, model: LanguageModel, loss: SampleLoss, epoch: Rollout, tokens_per_pass: int = 300) -> Tensor:
        model.module.zero_grad(set_to_none=True)
        rows = self.rows[loss.active]
        accumulate(model, loss, epoch, rows, float(len(self.samples.contexts)), tokens_per_pass)
        return flat_gradient(model)


def flat_gradient(model: LanguageModel) -> Tensor:
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]).clone()


def exact_cross_entropy_gradient(model: LanguageModel, universe: Universe, log_target: Tensor) -> Tensor:
    """Autograd through E_c CE(p_c, π) = −mean_c Σ_x p_c(x) log π(x|c), everything enumerated."""
    ideal = log_target.softmax(dim=1)
    model.module.zero_grad(set_to_none=True)
    loss = -(ideal * universe.differentiable_log_prob(model)).sum(dim=1).mean()
    loss.backward()
    return flat_gradient(model)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
