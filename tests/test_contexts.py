"""Contexts: what is read, what is refused and in which words, and the order in which they are drawn."""

from __future__ import annotations

import csv
import datetime
import decimal
import fractions
import hashlib
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpg.contexts.contexts import Context, load_contexts
from cdpg.contexts.digests import fingerprint
from cdpg.contexts.splitting import groups, whole_groups
from cdpg.contexts.stream import ContextStream
from cdpg.errors import UserError
from cdpg.messages.terms import on_command_line
from cdpg.storage.json_files import encode


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def prompts(contexts: list[Context]) -> list[Any]:
    return [context.prompt for context in contexts]


# Reading.


def test_csv_keeps_the_other_columns_and_counts_rows_below_the_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'source,reference\r\n"one,\nline","un ""x"""\r\n\r\nthree ,trois\r\n')
    assert load_contexts(path, prompt_column="source") == [
        Context("one,\nline", {"reference": 'un "x"'}, 1),
        Context("three ", {"reference": "trois"}, 2),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.CSV"])
def test_csv_with_any_line_end_and_tsv(tmp_path: Path, name: str, end: str) -> None:
    between = "\t" if name.endswith("tsv") else ","
    path = write(tmp_path / name, end.join([f"prompt{between}k", f"a{between}1", f"b{between}2"]))
    assert load_contexts(path) == [Context("a", {"k": "1"}, 1), Context("b", {"k": "2"}, 2)]


def test_long_csv_fields_are_read_and_the_module_wide_limit_is_left_as_it_was(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    text = "x" * (before + 1)
    assert prompts(load_contexts(write(tmp_path / "a.csv", f"prompt\n{text}\n"))) == [text]
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson"])
def test_jsonl_rows_are_lines_and_missing_columns_are_none(tmp_path: Path, name: str, notices: list[str]) -> None:
    path = write(tmp_path / name, '{"prompt": "a\u2028b", "k": 1}\n\n{"prompt": "c", "m": [2]}\n{"prompt": "d"}\n\n\n')
    assert load_contexts(path) == [
        Context("a\u2028b", {"k": 1, "m": None}, 1),
        Context("c", {"k": None, "m": [2]}, 3),
        Context("d", {"k": None, "m": None}, 4),
    ]
    assert notices == [
        f"1 blank line in {str(path)!r} skipped",
        "the column 'k' is missing in 2 of 3 contexts; constraints see None there",
        "the column 'm' is missing in 2 of 3 contexts; constraints see None there",
    ]


def test_json_list(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps([{"prompt": "a", "k": None}, {"prompt": "b", "k": {"x": 1.5}}]))
    assert load_contexts(path) == [Context("a", {"k": None}, 1), Context("b", {"k": {"x": 1.5}}, 2)]


def test_text_has_a_context_a_line_with_its_spaces(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "  def f(x): \r\nb\u2028c\x0bd\n\nlast")
    assert load_contexts(path) == [
        Context("  def f(x): ", {}, 1),
        Context("b\u2028c\x0bd", {}, 2),
        Context("last", {}, 4),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", "prompt\né\n"), ("a.jsonl", '{"prompt": "é"}'), ("a.json", '[{"prompt": "é"}]'), ("a.txt", "é\n")],
)
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str, content: str) -> None:
    assert prompts(load_contexts(write(tmp_path / name, b"\xef\xbb\xbf" + content.encode()))) == ["é"]


def test_lists_of_texts_and_of_rows() -> None:
    assert load_contexts(["a", "b"]) == [Context("a", {}, 1), Context("b", {}, 2)]
    rows = [{"q": "a", "prompt": 3}, {"q": "b", "prompt": 4}]
    assert load_contexts(rows, prompt_column="q") == [Context("a", {"prompt": 3}, 1), Context("b", {"prompt": 4}, 2)]


def test_contexts_that_were_loaded_before_pass_through() -> None:
    loaded = load_contexts([{"q": "a", "prompt": 3}], prompt_column="q")
    assert load_contexts(loaded) == loaded
    assert load_contexts(loaded * 3, limit=2) == loaded * 2
    with pytest.raises(UserError, match="row 7: only white space"):
        load_contexts([Context(" ", {}, 7)])


class FakeDataset:
    """What is used of ``datasets.Dataset``."""

    def __init__(self, rows: list[dict[str, Any]], column_names: Any) -> None:
        self.rows, self.column_names = rows, column_names

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_data_sets() -> None:
    rows = [{"prompt": "a", "k": 1}, {"prompt": "b", "k": 2}]
    expected = [Context("a", {"k": 1}, 1), Context("b", {"k": 2}, 2)]
    assert load_contexts(FakeDataset(rows, ["prompt", "k"])) == expected
    assert load_contexts(FakeDataset(rows, None)) == expected  # streamed, columns unknown beforehand
    with pytest.raises(UserError, match=r"several splits: choose one, such as dataset\['train'\]"):
        load_contexts(FakeDataset(rows, {"train": ["prompt"], "test": ["prompt"]}))
    datasets = pytest.importorskip("datasets")
    assert load_contexts(datasets.Dataset.from_list(rows)) == expected


def test_chat_prompts_become_tuples_of_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "hi", "name": "x"}]
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": chat}))
    (from_file,) = load_contexts(path)
    (from_list,) = load_contexts([{"prompt": chat}])
    assert from_file == from_list == Context(tuple(chat), {}, 1)
    assert not isinstance(from_file.prompt, str)
    chat[1]["content"] = "changed"
    assert from_list.prompt[1] == {"role": "user", "content": "hi", "name": "x"}


def test_the_limit_leaves_the_rest_unread(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\nbroken\n')
    assert prompts(load_contexts(path, limit=2)) == ["a", "b"]
    assert prompts(load_contexts(["a", "b", " "], limit=1)) == ["a"]
    for limit in (0, -1, True, 2.0):
        with pytest.raises(UserError, match="at least 1, not"):
            load_contexts(["a"], limit=limit)  # type: ignore[arg-type]


def test_duplicates_are_kept_and_counted(notices: list[str]) -> None:
    rows = [{"prompt": "a", "k": 1}, {"k": 1, "prompt": "a"}, {"prompt": "a", "k": 2}]
    assert len(load_contexts(rows)) == 3
    assert len(load_contexts(["a"] * 1201)) == 1201
    assert notices == [
        "1 of 3 contexts is a duplicate of an earlier one; it is kept and drawn more often "
        "(the first: row 2, the same as row 1)",
        "1,200 of 1,201 contexts are duplicates of earlier ones; they are kept and drawn more often "
        "(the first: row 2, the same as row 1)",
    ]


def test_a_column_without_a_name_is_left_out_aloud(tmp_path: Path, notices: list[str]) -> None:
    path = write(tmp_path / "a.csv", ",prompt\n0,a\n1,b\n")
    assert load_contexts(path) == [Context("a", {}, 1), Context("b", {}, 2)]
    assert notices == [f"column 1 of {str(path)!r} has no name in the header: left out"]


# Refusing. Each message names the place, what was found and what to do.

UNREADABLE: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("a.csv", "", "'a.csv' is empty: give at least one context"),
    "blank": ("a.jsonl", "\ufeff \r\n\n", "'a.jsonl' is empty: give at least one context"),
    "header only": ("a.csv", "prompt,k\n\n", "'a.csv' has a header and no rows below it: give at least one context"),
    "no items": ("a.json", "[]", "'a.json' holds no contexts: give at least one"),
    "ending": ("a.parquet", "x", "one of .csv, .tsv, .jsonl, .ndjson, .json, .txt; '.parquet' is not one of them"),
    "latin-1": ("a.csv", "prompt\nok\ncaf\xe9\n".encode("latin-1"), "'a.csv', line 3: byte 0xe9 is not UTF-8 text"),
    "latin-1 behind a mark": ("a.txt", b"\xef\xbb\xbfa\n\xe9", "'a.txt', line 2: byte 0xe9 is not UTF-8 text"),
    "utf-16": ("a.txt", "hello".encode("utf-16"), "'a.txt' is encoded in UTF-16, UTF-8 was expected: save it as UTF-8"),
    "utf-16, no mark": ("a.txt", "hello\n".encode("utf-16-le"), "'a.txt' is encoded in UTF-16, UTF-8 was expected"),
    "utf-32": ("a.txt", "hello".encode("utf-32"), "'a.txt' is encoded in UTF-32, UTF-8 was expected"),
    "nul": ("a.csv", "prompt\nok\na\0b\n", "'a.csv', line 3: a NUL character, where text was expected: remove it"),
    "nul in json": ("a.jsonl", r'{"prompt": "a\u0000"}', "line 1, 'prompt': a NUL character"),
    "ragged": (
        "a.csv",
        'prompt,k\n"a\nb",1\nc, d,2\n',
        "'a.csv', row 2 (line 4): 3 fields, where the header has 2: put a field that holds a comma",
    ),
    "ragged, short": ("a.tsv", "prompt\tk\na\n", "row 1 (line 2): 1 fields, where the header has 2: put a field that"),
    "semicolons": (
        "a.csv",
        "prompt;ref\none, two;un, deux\n",
        "'a.csv' has one column, 'prompt;ref', and seems to be separated by semicolons, where commas were expected: "
        "save it with commas, as .csv",
    ),
    "semicolons as tsv": ("a.tsv", "prompt;ref\na;b\n", "separated by semicolons, where tabs were expected: save it w"),
    "semicolons and quotes": ("a.csv", '\n"prompt";"ref"\n"a";"b"\n', "seems to be separated by semicolons"),
    "tabs": ("a.csv", "prompt\tref\na\tb\n", "separated by tabs, where commas were expected: end its name in .tsv"),
    "commas": ("a.tsv", "prompt,ref\na,b\n", "separated by commas, where tabs were expected: end its name in .csv"),
    "open quote": ("a.csv", 'prompt\nok\n"a\nb\n', "'a.csv', line 3: not valid CSV"),
    "stray quote": ("a.csv", 'prompt\n"a"b\n', "'a.csv', line 2: not valid CSV"),
    "twice": ("a.csv", "prompt,k,k\na,1,2\n", "the header names the column 'k' twice: rename one of them"),
    "broken line": ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"\n', "'a.jsonl', line 3: not valid JSON"),
    "no object": ("a.jsonl", '{"prompt": "a"}\n["b"]\n', "'a.jsonl', line 2: a list, where an object was expected"),
    "deep": ("a.jsonl", "[" * 100_000, "'a.jsonl', line 1: not valid JSON (nested too deeply)"),
    "fairly deep": ("a.jsonl", '{"prompt": "a", "k": ' + "[" * 300 + "]" * 300 + "}", "'k': nested more than 100"),
    "long number": ("a.jsonl", '{"prompt": "a", "k": ' + "1" * 5000 + "}", "'a.jsonl', line 1: not valid JSON"),
    "jsonl as json": ("a.json", '{"prompt": "a"}\n{"prompt": "b"}\n', "for one object a line, end the name in .jsonl"),
    "object as json": ("a.json", '{"prompt": "a"}', "'a.json' must hold a list of objects, [{...}, {...}], not an obj"),
    "text in json": ("a.json", '[{"prompt": "a"}, "b"]', "'a.json', item 2: a text, where an object was expected"),
    "surrogate": ("a.jsonl", r'{"prompt": "a\ud83d"}', "line 1, 'prompt': half of a surrogate pair"),
    "surrogate in a column": (
        "a.jsonl",
        r'{"prompt": "a", "k": [{"x": "\udc00"}]}',
        "line 1, 'k': half of a surrogate",
    ),
    "null": ("a.jsonl", '{"prompt": "a"}\n{"prompt": null}\n', "'a.jsonl', line 2, 'prompt': null, where a text or"),
    "number": ("a.json", '[{"prompt": 3}]', "item 1, 'prompt': a number, where a text or a list of chat messages"),
    "white": (
        "a.csv",
        "prompt,k\na,1\n \t,2\n",
        "row 2 (line 3), 'prompt': only white space, where a prompt was expec",
    ),
    "no prompt": ("a.csv", "prompt,k\n,2\n", "row 1 (line 2), 'prompt': an empty text, where a prompt was expected"),
    "absent in a row": ("a.jsonl", '{"prompt": "a"}\n{"promt": "b"}', "line 2: no 'prompt' here, though other rows"),
    "reserved": ("a.csv", "prompt,completions\na,b\n", "a column 'completions', which is what constraints get from"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    name, content, message = UNREADABLE[case]
    monkeypatch.chdir(tmp_path)
    write(Path(name), content)
    with pytest.raises(UserError) as caught:
        load_contexts(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    str(caught.value).encode()  # can be shown


def test_missing_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"there is no file 'train\.csv': give the path"):
        load_contexts("train.csv")
    write(Path("train.jsonl"), "x")
    with pytest.raises(UserError, match=r"there is no file 'train\.json'; did you mean 'train\.jsonl'\?"):
        load_contexts("train.json")
    with pytest.raises(UserError, match="is a folder: name the file"):
        load_contexts(tmp_path)
    with pytest.raises(UserError, match=r"there is no file 'none/a\.csv': [^;]*$"):
        load_contexts(Path("none/a.csv"))
    hub = r"there is no file 'user/questions': give .*; if it is a data set of the hub, "
    with pytest.raises(UserError, match=f"{hub}give the object that load_dataset returns$"):
        load_contexts("user/questions")
    with on_command_line(), pytest.raises(UserError, match=f"{hub}its to_json"):
        load_contexts("user/questions")


@pytest.mark.parametrize(
    ("header", "wanted", "advice"),
    [
        ("source,reference", "prompt", ", perhaps 'source'"),
        ("id,text", "prompt", ", perhaps 'text'"),
        ("sentence", "prompt", ", perhaps 'sentence'"),
        ("Prompt,k", "prompt", ", perhaps 'Prompt'"),
        ("source,reference", "sorce", ", perhaps 'source'"),
        ("a,b", "prompt", ""),
    ],
)
def test_a_missing_column_is_never_guessed(tmp_path: Path, header: str, wanted: str, advice: str) -> None:
    names = header.split(",")
    path = write(tmp_path / "a.csv", header + "\n" + ",".join("x" for _ in names) + "\n")
    has = f"{str(path)!r} has no column {wanted!r}; its columns are {', '.join(map(repr, names))}: "
    with pytest.raises(UserError) as caught:
        load_contexts(path, prompt_column=wanted)
    comma = "," if advice else ""
    assert str(caught.value) == f"{has}rename the one to use{advice}{comma} to {wanted!r}"
    with on_command_line(), pytest.raises(UserError) as caught:
        load_contexts(path, prompt_column=wanted)
    assert str(caught.value) == f"{has}name the one to use with --prompt-column{advice}"


def test_a_name_with_a_semicolon_may_be_the_only_one(tmp_path: Path) -> None:
    for header in ("a;b", '"a;b"'):
        path = write(tmp_path / "a.csv", f"{header}\nx;y\n")
        assert load_contexts(path, prompt_column="a;b") == [Context("x;y", {}, 1)]


def test_what_messages_hold_beside_their_text_is_made_plain() -> None:
    extras = {"sent": datetime.date(2020, 1, 2), "turn": np.int64(3), "tags": ("a", np.array([1.5]))}
    (context,) = load_contexts([{"prompt": [{"role": "user", "content": "hi", **extras}]}])
    plain = {"role": "user", "content": "hi", "sent": "2020-01-02", "turn": 3, "tags": ["a", [1.5]]}
    assert context.prompt == (plain,)
    assert json.loads(encode(context.prompt)) == [plain]


@pytest.mark.parametrize(("value", "told"), [(b"x", "a bytes"), (np.longdouble(1), "a longdouble"), ({1}, "a set")])
def test_what_no_log_can_hold_is_refused_in_a_message_by_row(value: Any, told: str) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi", "extra": {"deep": [value]}}]
    with pytest.raises(UserError, match=f"row 1 of .*message 2, 'extra': {told}, which cannot be logged"):
        load_contexts([{"prompt": chat}])


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        ([], "a chat without messages"),
        (["hi"], "message 1: a text"),
        ([{"role": "user"}], "message 1: has no 'content'"),
        ([{"content": "hi"}], "message 1: has no 'role'"),
        ([{"role": "user", "content": "hi"}, {"role": "user", "content": None}], "message 2: its 'content' is null"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1: its 'content' is a list"),
        ([{"role": " ", "content": "hi"}], "message 1: its 'role' is an empty text"),
        ([{"role": "user", "content": " \n"}], "all messages are empty"),
        ([{"role": "user", "content": "\0"}], "a NUL character"),
    ],
)
def test_chats_of_the_wrong_shape(chat: list[Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        load_contexts([{"prompt": "fine"}, {"prompt": chat}])
    assert str(caught.value).startswith("row 2 of the list of contexts, 'prompt'")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "the list of contexts holds no contexts"),
        (["a", 3], "row 2 of the list of contexts: a number, where a text or a dictionary"),
        ([{1: "a"}], "row 1 of the list of contexts: an object, where a text or a dictionary by column name"),
        (["a\ud800"], "half of a surrogate pair"),
        (3, "not 'int'"),
        (b"abc", "not 'bytes'"),
        ({"prompt": ["a"]}, "not 'dict'"),
        (FakeDataset([], ["prompt"]), "the FakeDataset holds no contexts"),
    ],
)
def test_objects_that_cannot_be_used(source: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_contexts(source)
    assert message in str(caught.value)


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
                "k": st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
            }
        ).filter(lambda row: bool(row["prompt"].strip())),
        min_size=1,
    )
)
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    folder = tmp_path_factory.mktemp("written")
    with (folder / "a.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "k"])
        writer.writeheader()
        writer.writerows(rows)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    expected = load_contexts(rows)
    assert [{"prompt": context.prompt, **context.columns} for context in expected] == rows
    assert load_contexts(folder / "a.csv") == load_contexts(folder / "a.jsonl") == expected


# The order.


def stream(size: int, seed: int) -> ContextStream:
    return ContextStream([Context(str(index), {}, index + 1) for index in range(size)], seed)


@given(size=st.integers(1, 40), count=st.integers(1, 100), seed=st.integers(0, 2**70))
def test_each_pass_covers_every_context_once(size: int, count: int, seed: int) -> None:
    drawn = stream(size, seed)
    epochs = [drawn.draw(epoch, count) for epoch in range(-(-3 * size // count))]
    assert all(len(indices) == count for indices in epochs)
    flat = [index for indices in epochs for index in indices]
    for start in range(0, 3 * size, size):
        assert sorted(flat[start : start + size]) == list(range(size))


@given(accesses=st.lists(st.integers(0, 30), min_size=1), count=st.integers(1, 9))
def test_any_order_of_access_gives_the_same(accesses: list[int], count: int) -> None:
    shared = stream(7, 3)
    for epoch in accesses:
        assert shared.draw(epoch, count) == stream(7, 3).draw(epoch, count)


def test_the_order_depends_on_the_seed_and_on_the_pass() -> None:
    orders = {tuple(stream(50, seed).draw(number, 50)) for seed in range(5) for number in range(5)}
    assert len(orders) == 25


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    """Golden values: were they to change, runs could not be repeated or resumed."""
    assert stream(10, 0).draw(0, 12) == [6, 3, 8, 1, 4, 5, 9, 2, 7, 0, 1, 3]
    assert stream(10, 2**40).draw(10**12, 4) == [5, 7, 6, 4]


def test_all_orders_are_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    drawn = stream(3, 11)
    for number in range(6000):
        order = tuple(drawn.draw(number, 3))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    # χ² with 5 degrees of freedom; the draws are seeded, so that this holds always or never.
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5


def test_few_permutations_are_kept() -> None:
    drawn = stream(4000, 0)
    drawn.draw(0, 8000)  # two passes
    tracemalloc.start()
    for epoch in range(50):
        drawn.draw(epoch, 8000)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 1_000_000  # a permutation takes 32,000 bytes and more, and a hundred were made


def test_nothing_to_draw_from() -> None:
    with pytest.raises(UserError, match="no contexts to draw from"):
        ContextStream([], 0)
    with pytest.raises(UserError, match="seed must be at least 0"):
        stream(3, -1)
    for epoch, count in ((-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="epoch must be at least 0"):
            stream(3, 0).draw(epoch, count)


# Groups.


def test_what_shares_a_group_or_a_prompt_belongs_together() -> None:
    chat = ({"role": "user", "content": "a"},)
    contexts = [
        Context("a", {}, 1),
        Context("b", {"group": "x"}, 2, "one"),
        Context("c", {"group": "x"}, 3, "two"),
        Context("a", {}, 4, "two"),  # joins the first to the third
        Context(chat, {}, 5),
        Context(({"content": "a", "role": "user"},), {"k": 1}, 6),
        Context("one", {}, 7),  # a prompt is no group
    ]
    assert groups(contexts) == [0, 1, 0, 0, 2, 2, 3]
    assert groups([]) == []


@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40),
    count=st.integers(0, 40),
    data=st.data(),
)
def test_a_group_is_never_parted(pairs: list[tuple[int, int]], count: int, data: st.DataObject) -> None:
    contexts = [Context(f"p{prompt}", {}, 1, f"g{group}" if group else None) for prompt, group in pairs]
    numbers = groups(contexts)
    order = data.draw(st.permutations(sorted(set(numbers))))
    chosen = whole_groups(numbers, order, count)
    one = [context for context, number in zip(contexts, numbers, strict=True) if number in chosen]
    other = [context for context, number in zip(contexts, numbers, strict=True) if number not in chosen]
    assert not {context.prompt for context in one} & {context.prompt for context in other}
    assert not ({context.group for context in one} & {context.group for context in other}) - {None}
    assert other or not contexts or len(one) <= count


def test_groups_that_fit_are_taken_in_order() -> None:
    numbers = [0, 0, 0, 1, 2, 2, 3]
    assert whole_groups(numbers, [0, 1, 2, 3], 4) == {0, 1}
    assert whole_groups(numbers, [2, 0, 3, 1], 4) == {2, 3, 1}
    assert whole_groups([0] * 9 + [1] * 8 + [2], [0, 1, 2], 4) == {1, 2}  # 1 alone would be too few
    assert whole_groups([0] * 9, [0], 4) == set()


# The fingerprint.


def test_the_fingerprint_is_of_prompts_and_columns_alone() -> None:
    one = [Context("a", {"k": 1, "m": (1, 2)}, 1), Context("b", {}, 2)]
    assert fingerprint(one) == fingerprint([Context("a", {"m": [1, 2], "k": 1}, 5), Context("b", {}, 9)])
    lines = b'["a", {"mapping": [["k", 1], ["m", [1, 2]]]}]\n["b", {"mapping": []}]\n'
    assert fingerprint(one) == hashlib.sha256(lines).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        [Context("b", {"k": 1}, 1), Context("a", {"k": 1}, 2)],
        [Context("a", {"k": 1}, 1)],
        [Context("a", {"k": 1}, 1), Context("b", {"k": "1"}, 2)],
        [Context("a", {"k": 1}, 1), Context("b", {"j": 1}, 2)],
        [Context("a", {"k": 1}, 1), Context("b ", {"k": 1}, 2)],
        [Context("a", {"k": 1}, 1), Context(({"role": "user", "content": "b"},), {"k": 1}, 2)],
    ],
)
def test_other_data_have_another_fingerprint(other: list[Context]) -> None:
    assert fingerprint(other) != fingerprint([Context("a", {"k": 1}, 1), Context("b", {"k": 1}, 2)])


def fingerprint_of(value: Any) -> str:
    return fingerprint([Context("a", {"k": value}, 1)])


SAMPLE_VALUES: list[Any] = [
    b"x",
    b"y",
    {1, 2},
    {1, 3},
    np.arange(3),
    np.arange(4),
    np.arange(3.0),
    np.float32(0.5),
    np.float32(0.25),
    datetime.date(2020, 1, 2),
    datetime.date(2020, 1, 3),
    datetime.datetime(2020, 1, 2),
    datetime.timedelta(seconds=1),
    datetime.timedelta(seconds=2),
    np.timedelta64(1, "s"),
    np.timedelta64(2, "s"),
    None,
    float("nan"),
    1,
    1.0,
    True,
    "1",
    {"x": 1},
    {"x": 2},
    1j,
    2j,
    np.complex64(1j),
    np.complex64(2j),
    decimal.Decimal("0.1"),
    decimal.Decimal("0.2"),
    fractions.Fraction(1, 2),
    fractions.Fraction(1, 3),
    np.longdouble(1),
    np.longdouble(1) / 3,
    np.array([np.longdouble(1)]),
    np.array([np.longdouble(2)]),
    np.clongdouble(1 + 1j),
    np.clongdouble(1 + 2j),
]


def test_values_that_differ_have_fingerprints_that_differ() -> None:
    found: dict[str, Any] = {}
    for value in SAMPLE_VALUES:
        assert fingerprint_of(value) not in found, (value, found[fingerprint_of(value)])
        found[fingerprint_of(value)] = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"b", "a", "c"}, {"c", "b", "a"}),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ((1, 2), [1, 2]),
        (bytearray(b"x"), b"x"),
        (np.longdouble("0.5"), np.longdouble(1) / 2),
        (np.array([1, 2], dtype=">i8"), np.array([1, 2], dtype="<i8")),
        (decimal.Decimal("1.5"), decimal.Decimal((0, (1, 5), -1))),
        (object(), object()),  # no memory address
    ],
)
def test_values_that_are_built_differently_and_say_the_same_share_a_fingerprint(one: Any, other: Any) -> None:
    assert fingerprint_of(one) == fingerprint_of(other)


@pytest.mark.parametrize(
    ("value", "line", "digest"),
    [
        (
            "é",
            r'["a", {"mapping": [["k", "\u00e9"]]}]',
            "1ec85a80e5f5065a00aa44ab937fba239572a4139a8f89206cc55ddd23c48872",
        ),
        (
            [1, 2.5, None, True],
            '["a", {"mapping": [["k", [1, 2.5, null, true]]]}]',
            "f1312bc059652fe4d7f34da5c0611b3b9ed89971116f28353580dedfcc862fff",
        ),
        (
            {"y": 1, "x": "z"},
            '["a", {"mapping": [["k", {"mapping": [["x", "z"], ["y", 1]]}]]}]',
            "73378b88ed81ade92d90a850473f04f45c804b19a7352fe14186710e7e3fa034",
        ),
        (
            np.float32(0.5),
            '["a", {"mapping": [["k", {"float32": 0.5}]]}]',
            "ce9c58d3014cf8ab6ce4cfda6f10406463c4df6fb70ff4ad0d783b76a352a5c9",
        ),
        (
            datetime.date(2020, 1, 2),
            '["a", {"mapping": [["k", {"date": "2020-01-02"}]]}]',
            "8e33e9778523cb482700efde0fc372f5393d200a197649ca487f147a186b03c5",
        ),
        (
            decimal.Decimal("0.10"),
            '["a", {"mapping": [["k", {"Decimal": "0.10"}]]}]',
            "83a2b43ad76b81ea72d4985e0dabb664ced443c0772645d245661d9544fc252c",
        ),
        (
            np.longdouble("0.5"),
            '["a", {"mapping": [["k", {"longdouble": "0.5"}]]}]',
            "b2ac5638d1f915fe5eecc2a45623877abb1b1a9cf503aae5ddd643609496d141",
        ),
    ],
)
def test_known_fingerprints(value: Any, line: str, digest: str) -> None:
    """SHA-256 of the line, as any other program computes it (``sha256sum``)."""
    assert hashlib.sha256(line.encode("ascii") + b"\n").hexdigest() == digest
    assert fingerprint_of(value) == digest


def test_contexts_that_differ_in_a_number_of_an_uncommon_type_are_no_duplicates(notices: list[str]) -> None:
    load_contexts([{"prompt": "a", "weight": np.longdouble(n)} for n in (1, 2)])
    assert notices == []
    load_contexts([{"prompt": "a", "weight": np.longdouble(n)} for n in (1, 1)])
    assert len(notices) == 1
    assert notices[0].startswith("1 of 2 contexts is a duplicate")
