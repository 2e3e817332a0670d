"""A server that speaks vLLM's protocol around a tiny model: plain forward passes of Transformers, nothing of cdpg."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlparse

import torch
from transformers import AutoModelForCausalLM

DEV = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info")
"""What a server has in its development mode alone."""


class FakeVLLM:
    """The state of the server; ``faults`` are the ways in which it misbehaves."""

    def __init__(self, folder: Path, window: int = 128) -> None:
        self.model = self._read(folder)
        self.window, self.version = window, "default"
        self.faults: set[str] = set()
        self.methods, self.loads = {"cdpg_load", "reload_weights"}, list[str]()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()

    @staticmethod
    def _read(folder: Path | str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.asked.append((path, body))
            if path in DEV and "no dev mode" in self.faults:
                return 404, {"detail": "Not Found"}
            if path in DEV[2:] and "old" in self.faults:
                return 404, {"detail": "Not Found"}
            return self._answers[path](self, body) if path in self._answers else (404, {"detail": "Not Found"})

    def _models(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        served = [{"id": "tiny", "max_model_len": self.window}, {"id": "adapter", "parent": "tiny"}]
        return 200, {"object": "list", "data": served * (2 if "two models" in self.faults else 1)}

    def _rpc(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["method"] not in self.methods:
            return 500, {"error": {"message": f"'Worker' object has no attribute '{body['method']}'", "code": 500}}
        self.loads.append(body["method"])
        if "refuses weights" in self.faults:
            return 500, {"error": {"message": "shapes do not match", "code": 500}}
        if "keeps weights" not in self.faults:
            self.model = self._read(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def _new_version(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.version = body["new_version"]
        return 200, {"success": True}

    @torch.inference_mode()
    def _complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["temperature"] == body["top_p"] == body["repetition_penalty"] == 1.0
        assert body["top_k"] == body["min_p"] == body["presence_penalty"] == body["frequency_penalty"] == 0
        assert body["return_token_ids"] is True
        assert body["logprobs"] == 0
        count, most = body["n"], body["max_tokens"]
        generators = [torch.Generator().manual_seed(body["seed"] + index) for index in range(count)]
        rows = torch.tensor([body["prompt"]] * count)
        tokens: list[list[int]] = [[] for _ in range(count)]
        values: list[list[float]] = [[] for _ in range(count)]
        ended = [False] * count
        for _ in range(most - 1 if "ends early" in self.faults else most):
            logits = self.model(rows).logits[:, -1].float()
            log_probs = logits if "logits" in self.faults else logits.log_softmax(dim=1)
            drawn = [torch.multinomial(p, 1, generator=g) for p, g in zip(logits.softmax(1), generators, strict=True)]
            rows = torch.cat([rows, torch.stack(drawn)], dim=1)
            for row, token in enumerate(map(int, drawn)):
                if not ended[row]:
                    tokens[row].append(token)
                    values[row].append(float(log_probs[row, token]))
                    ended[row] = token in body["stop_token_ids"]
        if "other tokens" in self.faults:
            tokens[0][0] = 5000
        if "no ids" in self.faults:
            return 200, {"choices": [{"index": 0, "text": "dogs"}]}
        if "other run" in self.faults:
            self.version = "of another run"
        choices = [
            {"index": i, "text": "", "token_ids": tokens[i], "logprobs": {"token_logprobs": values[i]}}
            for i in reversed(range(count))
        ]
        return 200, {"choices": choices}

    _answers: ClassVar[dict[str, Any]] = {
        "/v1/models": _models,
        "/v1/completions": _complete,
        "/collective_rpc": _rpc,
        "/reset_prefix_cache": lambda self, body: (200, {"success": True}),
        "/update_weight_version": _new_version,
        "/weight_info": lambda self, body: (200, {"weight_version": self.version}),
    }


@contextmanager
def serving(fake: FakeVLLM) -> Iterator[str]:
    """The address of a server, as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Be quiet."""

        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            self._send(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _send(self, body: dict[str, Any]) -> None:
            path = urlparse(self.path).path
            while "never answers" in fake.faults and path == "/v1/completions":
                time.sleep(0.1)
            if "hangs up" in fake.faults and path == "/v1/completions":
                self.close_connection = True
                return
            status, content = fake.answer(path, body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
