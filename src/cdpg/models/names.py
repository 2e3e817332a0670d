"""From a model's name to where it is: a folder, an embedded model or the hub. No torch: mistakes are told at once."""

from __future__ import annotations

import difflib
import os
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from cdpg.errors import UserError, first_line
from cdpg.messages.nearest import nearest_folder

EMBEDDED = Path(__file__).parents[1] / "assets" / "models"
"""The models that come with the package."""

_CLOSE = 0.8
_FIRST_FILES = ("config.json", "adapter_config.json")
"""One of them is among the files of every model."""


def locate(name: str) -> str:
    """The folder of an embedded model, by its name; any other name as it is.

    A name that is nearly an embedded one is refused, and so is a path at which there is nothing: the hub would be asked
    for it in vain.
    """
    if looks_like_path(name) and not Path(name).exists():
        raise UserError(f"there is no folder {name!r}{_meant(Path(name))}")
    if "/" in name or name in ("", ".", "..") or Path(name).exists():
        return name
    embedded = sorted(path.name for path in EMBEDDED.iterdir() if path.is_dir())
    if name in embedded:
        return str(EMBEDDED / name)
    near = difflib.get_close_matches(name, embedded, n=1, cutoff=_CLOSE)
    if near:
        raise UserError(f"there is no model {name!r}: did you mean {near[0]!r}, which comes with the package?")
    return name


def looks_like_path(name: str) -> bool:
    """Whether a name is meant as a path: by how it begins or ends, or since it lies in a folder that is there."""
    begins = name.startswith(("./", "../", "/", "~"))
    return begins or (name.endswith("/") and name != "/") or ("/" in name and Path(name).parent.is_dir())


def _meant(path: Path) -> str:
    """A folder with nearly that name beside it, as a question; else nothing."""
    near = nearest_folder(path)
    return f": did you mean {str(near)!r}?" if near else ""


@lru_cache(maxsize=64)
def _announce(name: str) -> None:
    """Say once that the hub is asked, which without network takes a while; on the first of several processes."""
    with suppress(OSError, ValueError, AttributeError):  # standard error may be gone
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"asking the hub for {ascii(name)[1:-1]}\n")
            sys.stderr.flush()


def require_model(name: str) -> None:
    """Refuse a name that is no folder and cannot be had from the hub, in seconds.

    Transformers asks for each file again and again while there is no network, for close to a minute. What the hub's
    cache holds is not asked for, and what may pass by itself, such as a busy hub, is left to Transformers.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if Path(name).is_dir():
        return
    try:
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in _FIRST_FILES):
            _announce(name)
            get_hf_file_metadata(hf_hub_url(name, _FIRST_FILES[0]))
    except HFValidationError as error:
        raise _missing(name, "there is no such folder, and it cannot be a hub id") from error
    except RepositoryNotFoundError as error:
        why = "the hub has no such model, or you may not read it (hf auth login logs you in)"
        raise _missing(name, why) from error
    except HfHubHTTPError:  # also of a repository without that file, which may hold adapters
        return
    except Exception as error:  # of the network: which class it is depends on the hub's library
        why = f"the hub cannot be reached, and its cache does not hold it ({first_line(error)})"
        raise _missing(name, why) from error


def _missing(name: str, why: str) -> UserError:
    embedded = ", ".join(sorted(path.name for path in EMBEDDED.iterdir() if path.is_dir()))
    return UserError(f"cannot load the model {name!r}: {why}; give a folder, a hub id or one of {embedded}")
