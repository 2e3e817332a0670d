"""vLLM as the sampler, with a server that speaks its protocol: what is cut, what q is, whose weights, what fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.contexts.contexts import Context
from cdpg.errors import CDPGError, RunError, UserError
from cdpg.models.base import LanguageModel
from cdpg.models.engines.local import Local
from cdpg.models.engines.server import Server
from cdpg.models.engines.vllm import Completion, VLLMEngine, Wanted
from cdpg.models.engines.worker import LoadsWeights
from cdpg.models.loading import load_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Chunk, Samples, assemble, sample_chunks
from cdpg.models.scoring import score_samples
from cdpg.models.tabular import TabularModel
from cdpg.storage.jsonl import read_jsonl
from cdpg.system.distributed import Processes
from cdpg.training.engine import DRIFT, DriftWatch, EngineLink
from fake_vllm import FakeVLLM, serving
from side_by_side import side_by_side

PROMPTS = [(0,), (1,), (2,)]
STREAM = UniformStream(3, "train", 4)
LENGTH = 4
WORDS = ("two dogs", "three cats", "one lazy fox")


# What is made of the tokens that an engine returns.


class Recorded:
    """Draws what the model itself would draw, to the end: it knows neither stop rule nor pruning."""

    def __init__(self, model: LanguageModel, samples: int) -> None:
        chunks = list(sample_chunks(model, PROMPTS, samples, LENGTH, STREAM, 1000))
        self.drawn = {row: (chunk, i) for chunk in chunks for i, row in enumerate(chunk.row)}

    def complete(self, wanted: Sequence[Wanted]) -> Iterator[list[Completion]]:
        for slot, one in enumerate(wanted):
            found = [self.drawn[slot * one.count + sample] for sample in range(one.count)]
            yield [Completion(chunk.tokens[i], chunk.token_log_q[i]) for chunk, i in found]

    def load(self, folder: str, version: str) -> None: ...

    def version(self) -> str | None: ...

    def close(self) -> None: ...


class StopsAfterB:
    watch = frozenset("b")

    def cut(self, completion: str) -> str | None:
        place = completion.find("b")
        return None if place < 1 else completion[:place]


class PrunesC:
    """Ends a row once it holds a c."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows

    def hopeless(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], text: Any) -> list[int]:
        return [row for row in rows if "c" in text(row, tokens[row]) and self.rows[row] % 5]

    def close(self) -> None: ...


@pytest.mark.parametrize("stop", [None, StopsAfterB()])
@pytest.mark.parametrize("prune", [None, PrunesC])
def test_outcomes_are_those_of_our_own_sampler(stop: Any, prune: Any) -> None:
    """The same tokens end at the same place, with the same text; log q sums the tokens up to there."""
    model = TabularModel(["x", "y", "z"], ("a", "b", "c"), LENGTH, seed=1)
    own = rows_of(sample_chunks(model, PROMPTS, 40, LENGTH, STREAM, 1000, stop, 0, prune))
    engine = VLLMEngine(Recorded(model, 40), model, 4)
    found = rows_of(engine.sample_chunks(PROMPTS, 40, LENGTH, STREAM, 1000, stop, 0, prune))
    assert found == own
    assert len(found) == 120
    assert any(row["pruned"] for row in found.values()) == (prune is not None)


def rows_of(chunks: Iterator[Chunk]) -> dict[int, dict[str, Any]]:
    return {
        row: {
            "tokens": chunk.tokens[i], "log_q": chunk.token_log_q[i], "ended": chunk.ended[i], "text": chunk.texts[i],
            "pruned": bool(chunk.pruned) and chunk.pruned[i],
        }
        for chunk in chunks
        for i, row in enumerate(chunk.row)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "values", "message"),
    [
        ((), (), "0 tokens with 0 log-probabilities"),
        ((1, 0), (-1.0,), "2 tokens with 1 log-probabilities"),
        ((1, 1, 1, 1, 1), (-1.0,) * 5, "5 tokens with 5 log-probabilities, of at most 4"),
        ((1, 9, 1, 1), (-1.0,) * 4, "token 9 is not one of the model's 4 tokens"),
        ((1, 1, 1, 1), (-1.0, 2.0, -1.0, -1.0), "not log-probabilities"),
        ((1, 1, 1, 1), (-1.0, float("nan"), -1.0, -1.0), "not log-probabilities"),
        ((1, 1), (-1.0, -1.0), "ends after 2 of 4 tokens without an end token"),
        ((0, 1, 1, 1), (-1.0,) * 4, "continues after an end token"),
    ],
)
def test_answers_that_are_not_samples_of_the_model_are_refused(
    tokens: tuple[int, ...], values: tuple[float, ...], message: str
) -> None:
    class Wrong(Recorded):
        def complete(self, wanted: Sequence[Wanted]) -> Iterator[list[Completion]]:
            yield [Completion(tokens, values)]

    model = TabularModel(["x", "y", "z"], ("a", "b", "c"), LENGTH, seed=1)
    engine = VLLMEngine(Wrong(model, 1), model, 4)
    with pytest.raises(RunError, match=f"the engine's answer cannot be used: .*{message}"):
        list(engine.sample_chunks(PROMPTS[:1], 1, LENGTH, STREAM, 10))
    with pytest.raises(RunError, match="gave 1 completions of a prompt, and 2 were asked for"):
        list(engine.sample_chunks(PROMPTS[:1], 2, LENGTH, STREAM, 10))


def test_seeds_are_told_apart() -> None:
    streams = [UniformStream(*key) for key in ((0, "train", 1), (1, "train", 1), (0, "other", 1), (0, "train", 2))]
    seeds = {stream.seed_of(slot) for stream in streams for slot in range(50)}
    assert len(seeds) == 200
    assert max(seeds) < 2**62
    ordered = sorted(seeds)
    assert min(b - a for a, b in pairwise(ordered)) > 2**20, "each counts on by itself"


# The server.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def fake(folder: Path) -> FakeVLLM:
    return FakeVLLM(folder)


def test_the_server_s_log_probabilities_are_the_model_s(folder: Path, fake: FakeVLLM) -> None:
    model: Any = load_model(str(folder), CDPGConfig(device="cpu"))
    contexts = [Context(text, {}, row) for row, text in enumerate(WORDS, start=1)]
    prompts = model.encode(contexts, 6)
    with serving(fake) as url:
        engine = VLLMEngine(Server.at(url, 30.0, 20), model, model.vocabulary)
        chunks = list(engine.sample_chunks(prompts, 8, 6, STREAM, 256))
        again = list(engine.sample_chunks(prompts, 8, 6, STREAM, 256))
        second = list(engine.sample_chunks(prompts[1:], 8, 6, STREAM, 256, first_slot=1))
    assert chunks == again, "seeds make it repeatable"
    assert [chunk.tokens for chunk in second] == [chunk.tokens for chunk in chunks[1:]], "whichever process asks"
    samples = assemble(contexts, prompts, chunks, 8)
    expected = score_samples(model, samples, torch.arange(24), 500)
    torch.testing.assert_close(samples.token_log_q, expected, rtol=0.0, atol=1e-4)
    assert len({tokens for chunk in chunks for tokens in chunk.tokens}) > 15
    assert torch.equal(samples.ended, (samples.lengths < 6) | ends_in(samples, model.end_ids))


def ends_in(samples: Samples, end_ids: frozenset[int]) -> torch.Tensor:
    """``[context, sample]``: whether the last token is an end token."""
    contexts, drawn = samples.shape
    last = [[samples.token_ids(i, j)[-1] in end_ids for j in range(drawn)] for i in range(contexts)]
    return torch.tensor(last)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("two models", UserError, "serves 4 models, and one was expected; start one with"),
        ("no dev mode", UserError, r"refuses /reset_prefix_cache: 404 Not Found; its weights cannot be changed: start"),
        ("short", UserError, "has a window of 9 tokens, and the longest prompt with its completion takes 20"),
        ("away", UserError, r"the engine at http://127.0.0.1:\d+ cannot be reached \(.*\): start it again"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_once(
    fake: FakeVLLM, fault: str, kind: type[CDPGError], message: str
) -> None:
    fake.faults.add(fault)
    fake.window = 9 if fault == "short" else 128
    with serving(fake) as url:
        place = url
        if fault != "away":
            with pytest.raises(kind, match=message):
                Server.at(url, 5.0, 20)
    if fault == "away":
        with pytest.raises(kind, match=message):
            Server.at(place, 5.0, 20)


# Runs.


def even(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [len(completion) % 2 == 0 for completion in completions]


def trainer_of(folder: Path, output: Path, url: str, **settings: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 3, "contexts_per_epoch": 2, "num_generations": 6, "max_completion_length": 5, "learning_rate": 1e-2,
        "warmup_epochs": 0, "device": "cpu", "check_workers": 0, "evaluate_every": 0, "log_samples": 12,
        "engine": "vllm", "engine_url": url, "engine_seconds": 20.0, "output_dir": str(output),
    }  # fmt: skip
    data = [{"prompt": text} for text in WORDS]
    return CDPGTrainer(str(folder), even, CDPGConfig(**(values | settings)), train_dataset=data)


def lines(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in read_jsonl(path)]


def test_the_engine_follows_the_policy(folder: Path, fake: FakeVLLM, tmp_path: Path) -> None:
    """After every epoch it has the policy's weights, by its own log-probabilities; a resumed run is the same run."""
    with serving(fake) as url:
        made = trainer_of(folder, tmp_path / "run", url)
        made.train()
        loads = list(fake.loads)
        versions = [body["new_version"].partition("-")[2] for path, body in fake.asked if "update" in path]
        trainer_of(folder, tmp_path / "parts", url, epochs=2).train()
        trainer_of(folder, tmp_path / "parts", url).train(resume_from_checkpoint=True)
    assert len(loads) == 3
    assert versions == ["0", "1", "2"]
    records = lines(tmp_path / "run" / "metrics.jsonl")
    for record in records:
        assert -1e-3 < record["engine_log_ratio_low"] <= record["engine_log_ratio_median"]
        assert record["engine_log_ratio_median"] <= record["engine_log_ratio_high"] < 1e-3
        assert record["satisfaction_policy"] == pytest.approx(record["satisfaction"], abs=1e-3)
    assert lines(tmp_path / "parts" / "metrics.jsonl") == records
    assert not (tmp_path / "run" / "engine").exists()
    base: Any = made.base
    with torch.no_grad():
        moved = [(a - b).abs().max() for a, b in zip(made.model.parameters(), base.module.parameters(), strict=True)]
    assert float(max(moved)) > 1e-2, "otherwise old weights would do as well"


def test_an_engine_that_is_synchronised_less_often(folder: Path, fake: FakeVLLM, tmp_path: Path) -> None:
    with serving(fake) as url:
        trainer_of(folder, tmp_path / "run", url, sync_every=2, engine_folder=str(tmp_path / "shared")).train()
        loads = [body["kwargs"]["weights_path"] for path, body in fake.asked if path == "/collective_rpc"]
        trainer_of(folder, tmp_path / "parts", url, sync_every=2, epochs=1).train()
        fake.version = "default"  # as after a restart: the held weights are sent again
        trainer_of(folder, tmp_path / "parts", url, sync_every=2).train(resume_from_checkpoint=True)
    records = lines(tmp_path / "run" / "metrics.jsonl")
    assert [record["proposal_age"] for record in records] == [0, 1, 0]
    assert all(abs(record["engine_log_ratio_median"]) < 1e-3 for record in records), "compared with the same weights"
    assert len(loads) == 2
    assert all(Path(path).parent == (tmp_path / "shared").resolve() for path in loads)
    assert list((tmp_path / "shared").iterdir()) == []
    assert lines(tmp_path / "parts" / "metrics.jsonl") == records


@pytest.mark.parametrize(("proposal", "marks"), [("base", "samples_of_base"), ("folder", "samples_of")])
def test_an_engine_may_draw_from_another_model(
    folder: Path, fake: FakeVLLM, tmp_path: Path, proposal: str, marks: str
) -> None:
    other = tiny.save(tmp_path / "other", "llama", seed=4) if proposal == "folder" else folder
    name = str(other) if proposal == "folder" else "base"
    with serving(fake) as url:
        trainer_of(folder, tmp_path / "run", url, proposal=name, epochs=2).train()
        assert len([path for path, _ in fake.asked if path == "/collective_rpc"]) == 1, "its weights do not change"
    model: Any = load_model(str(other), CDPGConfig(device="cpu"))
    for record in lines(tmp_path / "run" / "metrics.jsonl"):
        assert record[marks] == (True if proposal == "base" else name)
        assert abs(record["engine_log_ratio_median"]) < 1e-3
    satisfying = [sample for sample in read_jsonl(tmp_path / "run" / "samples.jsonl") if sample["b"]]
    if proposal == "base":
        assert any(sample["log_a"] != sample["log_q"] for sample in satisfying), "the base is scored here"
    contexts = [Context(text, {}, row) for row, text in enumerate(WORDS, start=1)]
    prompts = dict(zip(WORDS, model.encode(contexts, 5), strict=True))
    from cdpg.models.base import Rows

    for sample in list(read_jsonl(tmp_path / "run" / "samples.jsonl"))[:6]:
        ids = sample["token_ids"]
        rows = Rows(torch.tensor([0]), torch.tensor([ids]), torch.tensor([len(ids)]))
        with torch.no_grad():
            expected = float(model.score([prompts[sample["prompt"]]], rows).log_prob())
        assert sample["log_q"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hangs up", r"cannot be reached \(.*\): start it again, and continue with train\(resume_from_checkpoint="),
        ("never answers", r"did not answer /v1/completions within 2 seconds: raise engine_seconds, and continue"),
        ("ends early", "ends after 4 of 5 tokens without an end token"),
        ("logits", "it has numbers that are not log-probabilities"),
        ("other tokens", "token 5,000 is not one of the model's 300 tokens: let it serve the model that is tuned"),
        ("no ids", "gave no token ids with log-probabilities"),
        ("refuses weights", r"refuses /collective_rpc: 500 shapes do not match; it could not load the weights in"),
        ("keeps weights", "the engine's log-probabilities are not those of the model"),
        ("other run", "another program has changed the engine's weights while it drew samples"),
    ],
)
def test_what_goes_wrong_is_said_in_a_sentence_and_the_run_can_go_on(
    folder: Path, fake: FakeVLLM, tmp_path: Path, fault: str, message: str
) -> None:
    """The fault comes after the first epoch; without it the run is resumed, and nothing is lost."""

    class Breaks(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            fake.faults.add(fault)

    with serving(fake) as url:
        patience = 2.0 if fault == "never answers" else 20.0
        made = trainer_of(folder, tmp_path, url, epochs=2, engine_seconds=patience, learning_rate=0.3)
        made.add_callback(Breaks())
        with pytest.raises(CDPGError, match=message) as caught:
            made.train()
        assert "\n" not in str(caught.value)
        fake.faults.clear()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-000001"]
        if fault in ("hangs up", "refuses weights"):
            trainer_of(folder, tmp_path, url, epochs=2, learning_rate=0.3).train(resume_from_checkpoint=True)
            assert [record["epoch"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("fault", [None, "load", "version"])
def test_one_process_sends_the_weights_and_all_know_if_it_failed(
    folder: Path, tmp_path: Path, fault: str | None
) -> None:
    """Otherwise the others would wait for it; whoever samples, the version is that of the last weights."""
    loaded: list[str] = []

    class Connection(Recorded):
        def __init__(self) -> None: ...

        def load(self, folder: str, version: str) -> None:
            if fault == "load":
                raise RunError("it is full")
            loaded.append(version)

        def version(self) -> str | None:
            return "of another run" if fault == "version" and loaded else loaded[-1] if loaded else None

    model: Any = load_model(str(folder), CDPGConfig(device="cpu"))

    def send(processes: Processes) -> list[str]:
        link = EngineLink(Connection(), model, tmp_path / "engine", processes)
        problems = []
        for number in (0, 1, 1):
            try:
                link.send(number, CDPGConfig())
                link.require_unchanged()
            except RunError as error:
                problems.append(str(error))
        return problems

    main, other = side_by_side(2, send)
    assert [version.partition("-")[2] for version in loaded] == {None: ["0", "1"], "load": []}.get(
        fault, ["0", "1", "1"]
    )
    assert len(main) == len(other) == (0 if fault is None else 3)
    assert set(other) <= {"the main process could not use the engine"}
    if fault is not None:
        assert all({"load": "it is full", "version": "another program has changed"}[fault] in one for one in main)


def test_a_server_without_our_method_and_without_versions_can_be_used(
    folder: Path, fake: FakeVLLM, tmp_path: Path
) -> None:
    fake.faults.add("old")
    fake.methods.remove("cdpg_load")
    with serving(fake) as url:
        trainer_of(folder, tmp_path / "less often", url, epochs=2, sync_every=2).train()
        once = list(fake.loads)
        trainer_of(folder, tmp_path / "every epoch", url, epochs=2).train()
    assert once == ["reload_weights"]
    assert fake.loads == ["reload_weights"] * 3


class Layer(torch.nn.Module):
    """A layer that computes with a packed copy of its weight, as those of vLLM do on a CPU."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight, self.quant_method = weight, self
        self.process_weights_after_loading(self)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.packed = self.weight.detach().clone()


def test_a_tied_output_layer_gets_the_new_weights() -> None:
    """The worker prepares the layers that got weights, and a tied one gets none."""
    embeddings = Layer(torch.nn.Parameter(torch.zeros(3, 2)))
    other, head = Layer(torch.nn.Parameter(torch.zeros(2, 2))), Layer(embeddings.weight)

    class Worker(LoadsWeights):
        def reload_weights(self, weights_path: str) -> None:
            assert weights_path == "/folder"
            embeddings.weight.data.fill_(1.0)
            embeddings.process_weights_after_loading(embeddings)

        def get_model(self) -> Any:
            return torch.nn.ModuleList([embeddings, other, head])

    Worker().cdpg_load("/folder")
    assert torch.equal(head.packed, torch.ones(3, 2))
    assert torch.equal(other.packed, torch.zeros(2, 2))


def test_what_an_engine_is_not_for(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine is 'vllm', and vLLM is not installed here"):
        trainer_of(folder, tmp_path, "")
    with pytest.raises(UserError, match="engine_url is the address of a vLLM server: set engine: vllm"):
        CDPGConfig(engine_url="http://localhost:8000")
    with pytest.raises(UserError, match="must be an address such as http://localhost:8000, not 'localhost:8000'"):
        CDPGConfig(engine="vllm", engine_url="localhost:8000")
    with pytest.raises(UserError, match="engine_seconds must be above 0"):
        CDPGConfig(engine_seconds=0)
    with pytest.raises(UserError, match="whose layers are stored in 8 bits in a way that an engine cannot read"):
        trainer_of(folder, tmp_path, "http://127.0.0.1:9", proposal="base", base_dtype="int8", base_error=100.0)
    seq2seq = tiny.save(tmp_path / "t5", "t5")
    with pytest.raises(UserError, match="which is for decoder-only models of Transformers, and this is a Seq2SeqModel"):
        trainer_of(seq2seq, tmp_path / "run", "http://127.0.0.1:9")


class StubVLLM(ModuleType):
    """What is used of the package ``vllm``, with a model that draws token 7 and then the end."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.__spec__ = ModuleSpec("vllm", None)
        self.started: list[dict[str, Any]] = []
        self.loaded: list[Any] = []
        self.asked: list[tuple[Any, Any]] = []
        self.forgets = True
        self.SamplingParams, self.LLM = SimpleNamespace, self._llm

    def _llm(self, **settings: Any) -> Any:
        self.started.append(settings)
        return SimpleNamespace(
            generate=self._generate,
            collective_rpc=lambda method, kwargs: self.loaded.append((method, kwargs)),
            reset_prefix_cache=lambda: self.forgets,
        )

    def _generate(self, prompts: Any, settings: Any, use_tqdm: bool) -> Any:
        self.asked += zip(prompts, settings, strict=True)
        values = [
            {7: SimpleNamespace(logprob=-0.5), 9: SimpleNamespace(logprob=-0.1)},
            {2: SimpleNamespace(logprob=-3)},
        ]
        one = {"token_ids": [7, 2], "logprobs": values}
        return [SimpleNamespace(outputs=[SimpleNamespace(index=i, **one) for i in (1, 0)]) for _ in prompts]


def test_vllm_inside_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts with the first weights; later ones are loaded into it, and what it has computed is forgotten."""
    stub = StubVLLM()
    monkeypatch.setitem(sys.modules, "vllm", stub)
    local = Local(CDPGConfig(engine_memory=0.4, seed=5), 99, on_cpu=True)
    assert local.version() is None
    local.load("/first", "a")
    (started,) = stub.started
    assert {"model": "/first", "dtype": "float32", "max_model_len": 99, "gpu_memory_utilization": 0.4}.items() <= (
        started.items()
    )
    assert started["generation_config"] == "vllm", "not the model's temperature"
    local.load("/second", "b")
    assert stub.loaded == [("cdpg_load", {"weights_path": "/second"})]
    assert started["worker_extension_cls"] == "cdpg.models.engines.worker.LoadsWeights"
    assert local.version() == "b"
    assert len(stub.started) == 1
    (drawn,) = local.complete([Wanted((4, 5), 2, 3, 11, (2,))])
    assert drawn == [Completion((7, 2), (-0.5, -3.0))] * 2
    ((prompt, settings),) = stub.asked
    assert prompt == {"prompt_token_ids": [4, 5]}
    assert {"n": 2, "seed": 11, "temperature": 1.0, "top_k": 0, "stop_token_ids": [2]}.items() <= vars(settings).items()
    stub.forgets = False
    with pytest.raises(RunError, match="vLLM could not load the weights in '/third': the cache of prompts"):
        local.load("/third", "c")
    local.close()


def test_a_drift_is_noticed_once() -> None:
    watch = DriftWatch()
    names = ("engine_log_ratio_low", "engine_log_ratio_median", "engine_log_ratio_high")

    def record(*values: float) -> dict[str, Any]:
        return {"epoch": 7, **dict(zip(names, values, strict=True))}

    assert watch.warning({"epoch": 1}) is None
    assert watch.warning(record(-DRIFT, 0.0, DRIFT)) is None
    said = watch.warning(record(-0.01, 0.0, 1.5 * DRIFT))
    assert said is not None
    assert said.startswith("epoch 7: the engine's log-probabilities of samples differ")
    assert watch.warning(record(-9.0, 0.0, 9.0)) is None
    assert DriftWatch().warning(record(-1.5 * DRIFT, 0.0, 0.0)) is not None
    assert watch.verdict([]) is None
