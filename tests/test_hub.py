"""Uploading a model, against a stand-in for the hub's HTTP interface on this machine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.cli import app, exit_status
from cdpg.errors import RunError, UserError
from cdpg.storage.hub import push_folder
from cdpg.storage.json_files import write_yaml

TOKEN = "hf_secret"


class Hub:
    """What has arrived: requests, stored objects and committed files."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.created: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.allowed, self.refusal = True, 401
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                """Say nothing."""

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.requests.append((self.command, self.path))
                known = self.path.startswith("/objects/") or self.headers.get("Authorization") == f"Bearer {TOKEN}"
                status, reply = hub.reply(self.command, self.path, body) if known and hub.allowed else (hub.refusal, {})
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def reply(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.address}/me/short", "name": "me/short"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/models/me/short/preupload/main":
            return 200, {"files": [self._mode(file["path"]) for file in json.loads(body)["files"]]}
        if path == "/me/short.git/info/lfs/objects/batch":
            wanted = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [self._action(entry) for entry in wanted]}
        if match := re.fullmatch(r"/objects/([0-9a-f]{64})", path):
            self.objects[match[1]] = body
            return 200, {}
        if path == "/api/models/me/short/commit/main":
            self._commit(body)
            return 200, {"success": True, "commitUrl": f"{self.address}/me/short/commit/1", "commitOid": "1" * 40}
        return 404, {"error": f"{method} {path}"}

    def _mode(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False}

    def _action(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "actions": {"upload": {"href": f"{self.address}/objects/{entry['oid']}"}}}

    def _commit(self, body: bytes) -> None:
        for line in body.splitlines():
            record = json.loads(line)
            value = record["value"]
            if record["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif record["key"] == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
                assert hashlib.sha256(self.files[value["path"]]).hexdigest() == value["oid"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    stand_in = Hub()
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


def environment(hub: Hub) -> dict[str, str]:
    # Without Xet, whose protocol is a library's own; over plain HTTP the weights go by the older one.
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    return {**os.environ, **online}


def python(hub: Hub, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(hub), capture_output=True, text=True, timeout=200
    )


def is_private(created: dict[str, Any]) -> bool:
    """As the hub's library has said it in turn."""
    return created.get("private") is True or created.get("visibility") == "private"


def test_a_run_is_pushed_by_the_command(
    hub: Hub, tmp_path: Path, online: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save(tmp_path / "run" / "model", "llama")
    (model / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A card\n", encoding="utf-8")
    (model / ".README.md.7.tmp").write_text("left behind", encoding="utf-8")
    write_yaml(tmp_path / "run" / "config.yaml", {"model": "x"})
    result = python(hub, tmp_path, "-m", "cdpg", "push", "run", "me/short", "--private")
    assert result.returncode == 0, (result.stderr, hub.requests)
    assert f"{hub.address}/me/short" in result.stdout
    assert hub.created[0]["name"] == "short"
    assert hub.created[0]["organization"] == "me"
    assert is_private(hub.created[0])
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir() if not path.name.startswith(".")}
    hub.allowed = False
    online(hub.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        status = exit_status(lambda: app(args=["push", str(tmp_path / "run"), "me/short"], standalone_mode=False))
    assert status == 2, told.getvalue()
    assert "the hub does not know who uploads to 'me/short': log in with 'hf auth login'" in told.getvalue()
    assert "Traceback" not in told.getvalue()


def test_what_cannot_be_pushed_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model's folder"):
        push_folder(tmp_path / "none", "me/short")
    with pytest.raises(UserError, match="'me short!' is not the name of a repository"):
        push_folder(tmp_path, "me short!")
    with pytest.raises(
        UserError, match=f"offline mode: unset HF_HUB_OFFLINE and push again; the model stays in '{tmp_path}"
    ):
        push_folder(tmp_path, "me/short")


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the hub's library look for the hub at an address, without offline mode."""

    def look(address: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)

    return look


def test_a_trainer_pushes_its_model(
    hub: Hub, tmp_path: Path, online: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CDPGConfig(
        output_dir=str(tmp_path / "run"), epochs=1, contexts_per_epoch=1, num_generations=2, max_completion_length=3,
        device="cpu", check_workers=0,
    )  # fmt: skip
    trainer = CDPGTrainer(
        str(tiny.save(tmp_path / "llama", "llama")),
        lambda prompts, completions: [True for _ in prompts],
        config,
        [{"prompt": "two dogs"}],
    )
    trainer.train()
    online(hub.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # as in environment()
    assert trainer.push_to_hub("me/short").endswith("/me/short")
    model = tmp_path / "run" / "model"
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.files)
    assert not is_private(hub.created[0])


def test_without_network_there_is_one_sentence(tmp_path: Path, online: Callable[[str], None]) -> None:
    """From the command and from a trainer: both upload by this function."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        online(f"http://127.0.0.1:{free.getsockname()[1]}")  # where nobody listens
        with pytest.raises(RunError, match=r"cannot reach the hub \(.+\): check the network") as told:
            push_folder(tmp_path, "me/short", token=TOKEN)
    assert str(told.value).endswith(f"and push to 'me/short' again; the model stays in {str(tmp_path)!r}")


@pytest.mark.parametrize(
    ("status", "kind", "sentence"),
    [
        (401, UserError, r"does not know who uploads to 'me/short': log in with 'hf auth login'"),
        (403, UserError, r"does not let you write to 'me/short' \(status 403\): name a repository of yours"),
        (400, RunError, r"the upload to 'me/short' failed \(status 400\): "),
    ],
)
def test_what_the_hub_refuses_is_said(
    hub: Hub, tmp_path: Path, online: Callable[[str], None], status: int, kind: type[Exception], sentence: str
) -> None:
    online(hub.address)
    hub.allowed, hub.refusal = False, status
    with pytest.raises(kind, match=rf"{sentence}.*; the model stays in '{tmp_path}'$"):
        push_folder(tmp_path, "me/short", token=TOKEN)


def test_a_file_that_cannot_be_read_is_no_matter_of_the_network(
    hub: Hub, tmp_path: Path, online: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", "config.json")

    online(hub.address)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", refuse)
    with pytest.raises(RunError, match=r"the upload to 'me/short' failed: .*Permission denied.*; the model stays in"):
        push_folder(tmp_path, "me/short", token=TOKEN)


def test_an_option_that_the_hub_does_not_have_is_a_type_error(
    hub: Hub, tmp_path: Path, online: Callable[[str], None]
) -> None:
    online(hub.address)
    with pytest.raises(TypeError, match="privat"):
        push_folder(tmp_path, "me/short", token=TOKEN, privat=True)
