"""Functions of permissively licensed packages, for the training of `code-tiny`.

Sources come from the package index, as pip downloads them; nothing is installed. A package's files are taken in an
order given by a digest of their paths, up to a limit, so that no package prevails and no choice is made by hand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cdpg.tasks.code.signatures import definitions
from code_tiny_data import clean_body

logger = logging.getLogger("code_tiny")

CHARACTERS = 200_000
"""Of the bodies of a package, as many are taken; the file that reaches it is the last."""
LONGEST_BODY = 500
"""Characters of a body above which it hardly fits the model; it is not looked at further."""
LONG_BODY = 80
"""Characters above which a body is hardly met again by chance; shorter ones are often the same in many functions."""
SKIPPED = re.compile(r"(^|/)(_?vendor(ed)?|extern|migrations|locale|_distutils|site-packages|six\.py|_pb2)")
"""Copies of other packages, and generated code."""


@dataclasses.dataclass(frozen=True)
class Package:
    """A package of the index, in one version."""

    name: str
    version: str
    licence: str
    """SPDX expression, where there is one."""
    has_source_only: bool = False
    """Its source distribution is taken: the tests are not in the wheel."""


PACKAGES = (
    Package("django", "5.2.19", "BSD-3-Clause", has_source_only=True),
    Package("sqlalchemy", "2.1.8", "MIT", has_source_only=True),
    Package("tornado", "6.6.1", "Apache-2.0", has_source_only=True),
    Package("twisted", "26.10.0", "MIT"),
    Package("nova", "34.0.0", "Apache-2.0"),
    Package("swift", "2.38.3", "Apache-2.0"),
    Package("keystone", "30.0.0", "Apache-2.0"),
    Package("neutron", "29.0.0", "Apache-2.0"),
    Package("cinder", "29.0.0", "Apache-2.0"),
    Package("glance", "33.0.0", "Apache-2.0"),
    Package("moto", "5.2.5", "Apache-2.0"),
    Package("apache-beam", "2.77.0", "Apache-2.0"),
    Package("nltk", "3.10.4", "Apache-2.0"),
    Package("sympy", "1.14.0", "BSD-3-Clause"),
    Package("networkx", "3.6.1", "BSD-3-Clause"),
    Package("scikit-learn", "1.9.1", "BSD-3-Clause"),
    Package("pandas", "3.1.1", "BSD-3-Clause"),
    Package("astropy", "8.0.2", "BSD-3-Clause"),
    Package("statsmodels", "0.15.0", "BSD-3-Clause"),
    Package("numpy", "2.4.6", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
    Package("scipy", "1.17.1", "BSD-3-Clause"),
    Package("dask", "2026.8.0", "BSD-3-Clause"),
    Package("distributed", "2026.8.0", "BSD-3-Clause"),
    Package("wagtail", "8.0.1", "BSD-3-Clause"),
    Package("bokeh", "3.9.2", "BSD-3-Clause"),
    Package("ipython", "9.18.1", "BSD-3-Clause"),
    Package("cherrypy", "18.10.0", "BSD-3-Clause"),
    Package("werkzeug", "3.1.9", "BSD-3-Clause"),
    Package("jinja2", "3.1.6", "BSD-3-Clause"),
    Package("scrapy", "2.19.0", "BSD-3-Clause"),
    Package("rdflib", "7.6.0", "BSD-3-Clause"),
    Package("reportlab", "5.1.0", "BSD-3-Clause"),
    Package("passlib", "1.7.4", "BSD-3-Clause"),
    Package("sphinx", "9.0.4", "BSD-2-Clause"),
    Package("pygments", "2.21.0", "BSD-2-Clause"),
    Package("pytest", "9.2.0", "MIT"),
    Package("mypy", "2.4.1", "MIT"),
    Package("fonttools", "4.68.0", "MIT"),
    Package("textual", "8.2.8", "MIT"),
    Package("rich", "15.0.0", "MIT"),
    Package("trio", "0.35.0", "MIT OR Apache-2.0"),
    Package("matplotlib", "3.11.2", "matplotlib licence, after PSF-2.0"),
)


def download(packages: Iterable[Package], folder: Path) -> list[Path]:
    """The archives of the packages, downloaded where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for package in packages:
        place = folder / f"{package.name}-{package.version}"
        if not place.is_dir():
            kind = ["--no-binary", ":all:"] if package.has_source_only else ["--only-binary", ":all:"]
            wanted = f"{package.name}=={package.version}"
            partial = place.with_suffix(".partial")
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(partial), *kind]
            subprocess.run([*command, wanted], check=True)
            partial.rename(place)
        found.append(min(path for path in place.iterdir() if path.suffix in (".whl", ".gz")))
    return found


def sources(archive: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every Python file of a wheel or a source distribution."""
    for name, raw in _files(archive):
        if name.endswith(".py") and not SKIPPED.search(name):
            try:
                yield name, raw.decode("utf-8").replace("\r\n", "\n")
            except UnicodeError:
                continue


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield name, wheel.read(name)
        return
    with tarfile.open(archive) as distribution:
        for member in distribution:
            content = distribution.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.partition("/")[2], content.read()  # below the folder name-version


def package_functions(
    archive: Path, held_out: Iterable[tuple[str, str]], signatures: Iterable[str]
) -> list[tuple[str, str]]:
    """(signature, cleaned body) of an archive's functions, up to a limit.

    A file is left out if it has a listed signature, or a long body in common with the held-out functions, as a copy of
    their file. So is a function with a body of theirs, whatever its length.
    """
    listed, bodies = set(signatures), {body for _, body in held_out}
    long = {body for body in bodies if len(body) > LONG_BODY}
    found: list[tuple[str, str]] = []
    characters, dropped = 0, 0
    for _, source in sorted(sources(archive), key=lambda item: hashlib.md5(item[0].encode()).digest()):
        defined = definitions(source)
        cleaned = [(definition.signature, clean_body(definition)) for definition in defined]
        if any(definition.signature in listed for definition in defined) or any(body in long for _, body in cleaned):
            dropped += 1
            continue
        kept = [
            (signature, body)
            for signature, body in cleaned
            if body is not None and len(body) <= LONGEST_BODY and body not in bodies
        ]
        found += kept
        characters += sum(len(body) for _, body in kept)
        if characters >= CHARACTERS:
            break
    logger.info("%s: %d functions, %d characters, %d files left out", archive.name, len(found), characters, dropped)
    return found


def collect(
    packages: Sequence[Package], work: Path, held_out: Iterable[tuple[str, str]], signatures: Iterable[str]
) -> list[tuple[str, str]]:
    """Distinct functions of the packages; those of each are kept in the work folder."""
    apart, listed = list(held_out), list(signatures)
    found: list[tuple[str, str]] = []
    for package, archive in zip(packages, download(packages, work / "archives"), strict=True):
        kept = work / "functions" / f"{package.name}-{package.version}.json"
        if not kept.is_file():
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(package_functions(archive, apart, listed)), encoding="utf-8")
        found += [(signature, body) for signature, body in json.loads(kept.read_text(encoding="utf-8"))]
    return distinct(found)


def distinct(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first function of every body."""
    found: dict[str, str] = {}
    for signature, body in pairs:
        found.setdefault(body, signature)
    return [(signature, body) for body, signature in found.items()]
