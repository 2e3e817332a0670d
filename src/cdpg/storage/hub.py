"""Uploads a model's folder to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdpg.errors import CDPGError, RunError, UserError, first_line


def push_folder(folder: Path, repo_id: str, private: bool | None = None, **options: Any) -> str:
    """Upload a model's folder, card included, to a repository, which is created if needed; returns its address.

    ``options`` are those of ``huggingface_hub.HfApi.upload_folder``; ``token`` is used for both steps.
    """
    if not folder.is_dir():
        raise UserError(f"there is no model's folder {str(folder)!r} to upload: train first")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    token = options.pop("token", None)
    options.setdefault("commit_message", "Upload a model tuned with cdpg")
    options.setdefault("ignore_patterns", [".*"])  # leftovers of a killed writer
    api = HfApi(token=token)
    try:
        address = str(api.create_repo(repo_id, exist_ok=True, private=private))
        api.upload_folder(repo_id=repo_id, folder_path=folder, **options)
    except HFValidationError as error:
        raise UserError(
            f"{repo_id!r} is not the name of a repository: expected user/name ({first_line(error)})"
        ) from error
    except TypeError:  # an option that the hub's library does not have
        raise
    except Exception as error:  # its class depends on the hub's HTTP library
        raise _upload_error(repo_id, folder, error) from error
    return address


def _upload_error(repo_id: str, folder: Path, error: Exception) -> CDPGError:
    """The error for a failed upload: the reason, what to do, and where the model is."""
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    kept = f"the model stays in {str(folder)!r}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return UserError(f"nothing can be uploaded in offline mode: unset HF_HUB_OFFLINE and push again; {kept}")
    if status == 401 or isinstance(error, LocalTokenNotFoundError):
        return UserError(
            f"the hub does not know who uploads to {repo_id!r}: log in with 'hf auth login', or set HF_TOKEN to a "
            f"valid token, and push again; {kept}"
        )
    if status == 403:
        return UserError(
            f"the hub does not let you write to {repo_id!r} (status 403): name a repository of yours, or use a token "
            f"that may write there, and push again; {kept}"
        )
    why = first_line(error)
    if status is None and (type(error).__module__.startswith("http") or isinstance(error, ConnectionError)):
        return RunError(f"cannot reach the hub ({why}): check the network, and push to {repo_id!r} again; {kept}")
    answered = f" (status {status})" if status else ""
    return RunError(f"the upload to {repo_id!r} failed{answered}: {why}; {kept}")
