"""Signatures from source trees: what is taken, what is left out, and that the parts are disjoint."""

from __future__ import annotations

import ast
import io
import json
import tarfile
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from cdpg.errors import UserError
from cdpg.tasks.code.constraint import compiles, pep8_clean
from cdpg.tasks.code.signatures import (
    Definition,
    definitions,
    python_files,
    read_source,
    signatures_in,
    split_files,
    split_signatures,
    standard_library,
)

SOURCE = '''\
import os


@decorated(1,
           2)
def plain(a, b=(1, 2), *args, key: int = 3) -> dict[str, int]:  # why
    """What it does."""
    def inner(x=lambda y: y):
        return x

    return a


class Thing:
    @property
    def name(self):
        return """
left of all"""

    async def later(self):
        pass

    def spread(
        self,
        a,
    ):
        pass

    def short(self): return 1

    def wide(self, text=")#: "):
        if self:
            pass
'''


def test_what_is_taken_from_a_source() -> None:
    assert list(definitions(SOURCE)) == [
        Definition(
            "def plain(a, b=(1, 2), *args, key: int = 3) -> dict[str, int]:",
            '\n    """What it does."""\n    def inner(x=lambda y: y):\n        return x\n\n    return a',
        ),
        Definition("def inner(x=lambda y: y):", "\n    return x"),
        Definition("def name(self):", '\n    return """\nleft of all"""'),
        Definition("def short(self):", " return 1"),
        Definition('def wide(self, text=")#: "):', "\n    if self:\n        pass"),
    ]


@pytest.mark.parametrize(
    "source",
    ["print 'Python 2'", "def f(:\n    pass", "", "a\x00b", "def f() -> lambda: 1:\n    pass\n", "(" * 300 + ")" * 300],
)
def test_sources_that_give_nothing(source: str) -> None:
    assert list(definitions(source)) == []


def test_warnings_of_a_source_are_not_shown(recwarn: pytest.WarningsRecorder) -> None:
    assert len(list(definitions("def f(x='\\d'):\n    return x is 1\n"))) == 1
    assert not recwarn.list


def test_tabs_and_continued_lines() -> None:
    source = "class A:\n\tdef f(self):\n\t\treturn 1\n\tdef g(self, \\\n\t\t\tx):\n\t\treturn 2\n"
    assert list(definitions(source)) == [Definition("def f(self):", "\n\treturn 1")]


def test_files_are_read_by_their_own_encoding(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\r\ndef f(é):\r\n    return é\r\n".encode("latin-1"))
    (tmp_path / "broken.py").write_bytes(b"def g():\n    return '\xff'\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: klingon\ndef h(): pass\n")
    assert signatures_in(python_files(tmp_path)) == ["def f(é):"]
    assert read_source(tmp_path / "broken.py") is None


def test_other_packages_are_left_out(tmp_path: Path) -> None:
    for name in ("b/x.py", "a.py", "site-packages/p/y.py", "b/__pycache__/z.py", "b/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def f(): pass\n")
    assert python_files(tmp_path) == [tmp_path / "a.py", tmp_path / "b" / "x.py"]


def test_a_folder_without_sources_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no Python source"):
        python_files(tmp_path)
    with pytest.raises(UserError, match="not a folder"):
        python_files(tmp_path / "absent")
    with pytest.raises(UserError, match="shares"):
        split_files([tmp_path], shares=(0.5, 0.5, 0.5))


def test_files_are_split_by_seed_into_disjoint_parts(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.py" for number in range(100)]
    split = split_files(paths, seed=3)
    assert (len(split.base), len(split.tuning), len(split.evaluation)) == (84, 10, 6)
    assert sorted(split.base + split.tuning + split.evaluation) == sorted(paths)
    assert split == split_files(paths, seed=3)
    assert split != split_files(paths, seed=4)


def test_signatures_are_distinct_within_and_between_parts(tmp_path: Path) -> None:
    for number in range(20):
        text = f"def setUp(self): pass\n\n\ndef own{number}(): pass\n\n\ndef own{number}(): pass\n"
        (tmp_path / f"{number}.py").write_text(text)
    split = split_signatures(tmp_path, shares=(0.5, 0.25, 0.25))
    assert (len(split.base), len(split.tuning), len(split.evaluation)) == (11, 5, 5)
    everything = split.base + split.tuning + split.evaluation
    assert len(set(everything)) == len(everything) == 21
    assert "def setUp(self):" in split.base


def test_the_standard_library_gives_signatures() -> None:
    found = signatures_in([standard_library() / "textwrap.py"])
    assert "def fill(self, text):" in found
    for signature in found:
        assert isinstance(ast.parse(signature + " pass").body[0], ast.FunctionDef)


def shipped(name: str) -> list[str]:
    text = files("cdpg").joinpath("tasks", "code", "data", f"signatures_{name}.txt").read_text(encoding="utf-8")
    return text.splitlines()


def test_shipped_lists_are_disjoint_and_can_be_satisfied() -> None:
    tuning, evaluation = shipped("tuning"), shipped("evaluation")
    assert (len(set(tuning)), len(set(evaluation))) == (2000, 1000)
    assert (len(tuning), len(evaluation)) == (2000, 1000)
    assert not set(tuning) & set(evaluation)
    both = tuning + evaluation
    assert all(pep8_clean(both, ["\n    pass"] * len(both)))
    assert all(compiles(both, ["\n    pass"] * len(both)))
    tests = sum(signature.startswith("def test") for signature in both)
    assert tests <= len(both) / 2


MODEL = Path(str(files("cdpg").joinpath("assets", "models", "code-tiny")))
needs_model = pytest.mark.skipif(not (MODEL / "README.md").is_file(), reason="made by recipes/code_tiny.py")


@needs_model
def test_a_signature_has_the_same_tokens_with_and_without_a_body() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    for signature in shipped("evaluation"):
        alone = tokenizer.encode(signature)
        whole = tokenizer.encode(signature + "\n    return 1")
        assert whole[: len(alone)] == alone
        assert tokenizer.decode(whole) == signature + "\n    return 1"
        assert len(alone) <= 64 and tokenizer.eos_token_id not in whole


@needs_model
def test_the_shipped_model_is_small_and_plain() -> None:
    folder = MODEL
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000
    assert {path.suffix for path in folder.iterdir()} == {".json", ".md", ".safetensors"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    sampling = json.loads((folder / "generation_config.json").read_text())
    assert (sampling["do_sample"], sampling["top_k"], sampling["top_p"], sampling["temperature"]) == (True, 0, 1, 1)


def test_the_recipe_finds_what_was_learnt_by_heart() -> None:
    from code_tiny_card import memorised

    long = "\n    return " + "x" * 90
    learnt = [long + "\n    more", "\n    return 1"]
    sources = ["def f(x):" + body + "\n" for body in (long, "\n    return 1", "\n    return 2", long + "\n    other")]
    found = memorised(["def f(x):"] * 4, sources, learnt)
    assert (found["samples"], found["verbatim"], found["long"], found["long_verbatim"]) == (4, 0.5, 2, 0.5)


def test_the_recipe_leaves_out_files_with_signatures_or_bodies_set_apart(tmp_path: Path) -> None:
    from code_tiny_packages import distinct, package_functions

    long = "\n    return " + "x" * 80
    files = {
        "a/good.py": f"def one(a):{long}1\n\n\ndef two(a):\n    return 2\n\n\ndef three(a):\n    return 3\n",
        "a/listed.py": "def listed(a):\n    return 4\n\n\ndef beside(a):\n    return 5\n",
        "a/copied.py": f"def copied(a):{long}\n\n\ndef near(a):\n    return 6\n",
        "a/_vendor/other.py": "def other(a):\n    return 7\n",
        "a/long.py": f"def far(a):\n    return {'7' * 80}{' + 1' * 4}\n" + "    a += 1\n" * 60,
    }
    wheel, source = tmp_path / "a-1-py3-none-any.whl", tmp_path / "a-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    with tarfile.open(source, "w:gz") as packed:
        for name, text in files.items():
            member = tarfile.TarInfo(f"a-1/{name}")
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text.encode()))
    apart = [("def held(b):", long), ("def out(b):", "\n    return 2")]
    expected = [("def one(a):", long + "1"), ("def three(a):", "\n    return 3")]
    assert package_functions(wheel, apart, ["def listed(a):"]) == expected
    assert package_functions(source, apart, ["def listed(a):"]) == expected
    assert distinct([("a", "x"), ("b", "y"), ("c", "x")]) == [("a", "x"), ("b", "y")]


def test_what_cannot_be_read_does_not_stop_a_source_tree(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("def f(a):\n    pass\n")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.py").mkdir()
    assert python_files(tmp_path) == [tmp_path / "good.py"]
    assert read_source(tmp_path / "folder.py") is None, "what vanishes or is barred between listing and reading"
    assert signatures_in([tmp_path / "gone.py", tmp_path / "good.py"]) == ["def f(a):"]
