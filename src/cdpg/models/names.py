"""Resolves a model's name to a folder, an embedded or packaged model, or the hub.

It imports no torch, so that errors come at once; only the first use of a packaged model does, to convert it.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from cdpg.errors import UserError, first_line
from cdpg.messages.nearest import NEARLY_EQUAL, nearest, nearest_folder
from cdpg.models.packaged import PACKAGED, packaged_folder

_log = logging.getLogger(__name__)

EMBEDDED = Path(__file__).parents[1] / "assets" / "models"
"""The models that come with the package."""

_FIRST_FILES = ("config.json", "adapter_config.json")
"""Every model has one of these files."""


def locate(name: str) -> str:
    """The folder of an embedded or packaged model; any other name unchanged.

    A misspelt name of such a model, the folder of a run, or a path that does not exist, is refused without asking the
    hub.
    """
    if looks_like_path(name) and not Path(name).exists():
        raise UserError(f"there is no folder {name!r}{_meant(Path(name))}")
    own = Path(name) / "model"
    if own.is_dir() and (Path(name) / "config.yaml").is_file() and not (Path(name) / _FIRST_FILES[0]).is_file():
        raise UserError(f"{name!r} is the folder of a run: give its model, {str(own)!r}")
    if "/" in name or name in ("", ".", "..") or Path(name).exists():
        return name
    embedded = _embedded()
    if name in embedded:
        return str(EMBEDDED / name)
    if name in PACKAGED:
        return str(packaged_folder(name))
    near = nearest(name, [*embedded, *PACKAGED], NEARLY_EQUAL)
    if near:
        comes = "comes with the package" if near in embedded else f"the extra {PACKAGED[near].extra} installs"
        raise UserError(f"there is no model {name!r}: did you mean {near!r}, which {comes}?")
    return name


def _embedded() -> list[str]:
    return sorted(path.name for path in EMBEDDED.iterdir() if path.is_dir())


def looks_like_path(name: str) -> bool:
    """Whether a name is a path: by its beginning or end, or because its parent folder exists."""
    begins = name.startswith(("./", "../", "/", "~"))
    return begins or (name.endswith("/") and name != "/") or ("/" in name and Path(name).parent.is_dir())


def _meant(path: Path) -> str:
    """A question that suggests a folder with a similar name, or nothing."""
    near = nearest_folder(path)
    return f": did you mean {str(near)!r}?" if near else ""


@lru_cache(maxsize=64)
def _announce(name: str) -> None:
    """Say once that the hub is asked, which is slow without a network."""
    _log.info(f"asking the hub for {ascii(name)[1:-1]}")


def require_model(name: str) -> None:
    """Refuse, within seconds, a name that is neither a folder nor a model on the hub.

    Without a network Transformers retries each file for close to a minute. A model in the hub's cache is not asked for,
    and temporary errors, such as a busy hub, are left to Transformers.
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
    known = ", ".join([*_embedded(), *PACKAGED])
    return UserError(f"cannot load the model {name!r}: {why}; give a folder, a hub id or one of {known}")
