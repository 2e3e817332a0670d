"""Uploading a model's folder to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdpg.errors import CDPGError, RunError, UserError, first_line


def push_folder(folder: Path, repo_id: str, private: bool | None = None, **options: Any) -> str:
    """Upload a model's folder, its card included, to a repository that is made if there is none; its address.

    ``options`` are those of ``huggingface_hub.HfApi.upload_folder``; ``token`` is used for both steps.
    """
    if not folder.is_dir():
        raise UserError(f"there is no model's folder {str(folder)!r} to upload: train first")
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    token = options.pop("token", None)
    options.setdefault("commit_message", "Upload a model tuned with cdpg")
    options.setdefault("ignore_patterns", [".*"])  # what a killed writer may have left
    api = HfApi(token=token)
    try:
        address = str(api.create_repo(repo_id, exist_ok=True, private=private))
        api.upload_folder(repo_id=repo_id, folder_path=folder, **options)
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is no name of a repository: expected user/name ({first_line(error)})") from error
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        raise _told(repo_id, error) from error
    return address


def _told(repo_id: str, error: Exception) -> CDPGError:
    """What stood in the way: the user's, if it is permission or the offline switch; else the network's or the hub's."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return UserError("nothing can be uploaded in offline mode: unset HF_HUB_OFFLINE")
    if status in (401, 403):
        return UserError(
            f"the hub refuses {repo_id!r} (status {status}): log in with 'hf auth login', or set HF_TOKEN to a token "
            f"that may write there"
        )
    return RunError(f"cannot upload to {repo_id!r}: {first_line(error)}; try again")
