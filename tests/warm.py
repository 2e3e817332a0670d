"""A Python that starts at once: each process is a fork of a server that has imported the package already.

Importing torch and transformers takes seconds, the run of a test a fraction of one. :func:`python` is the path of a
program to start in place of ``sys.executable``. For ``-m cdpg`` and for scripts it asks the server for a fork, hands it
its standard streams and its environment, passes signals on and ends as the fork ends; anything else it leaves to the
interpreter. ``sys.executable`` of a fork is that program, so the processes which a fork starts are quick, too.

The test processes of xdist are such forks as well (:func:`use`), but their ``sys.executable`` is the interpreter.

The server waits for its first request before it imports anything. Test processes side by side have one in common,
which the process that started them keeps (:func:`share`).

What an import does, or a forgotten one, is not seen this way: some tests start the interpreter itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import shlex
import signal
import socket
import sys
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

TESTS = os.path.dirname(os.path.abspath(__file__))
GARBAGE = 20_000
"""New objects after which garbage is collected: with the usual 700, that is a twentieth of the time of the tests."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MODULE = ["-m", "cdpg"]
TEST_PROCESS = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""How execnet starts a test process for xdist. Should it change, then test processes import everything themselves."""
_NOTHING = bytes(8)
"""The length of a request that asks for nothing but an answer."""
_SHARED = "CDPG_TESTS_PYTHON"
"""The environment variable that holds the path of the program, for test processes that have one in common."""


# --- the test's side ---


@functools.cache
def python() -> str:
    """The program, once its server is ready. Unless there is one to share, the first call starts it."""
    program = os.environ.get(_SHARED) or _start_server()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(os.path.dirname(program), "socket"))
        connection.sendall(_NOTHING)
        _receive(connection, len(_NOTHING))
    return program


def share() -> None:
    """Have the test processes that this one starts use one server, which ends with :func:`close`."""
    os.environ[_SHARED] = _start_server()


def use(specs: Iterable[Any]) -> None:
    """Have xdist's test processes here be forks of the shared server; ``specs`` are execnet's."""
    for spec in specs:
        if spec.popen and not spec.python and _SHARED in os.environ:
            spec.python = shlex.quote(os.environ[_SHARED])


def _start_server() -> str:
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="warm-")
    program, address = os.path.join(folder, "python"), os.path.join(folder, "socket")
    with open(program, "w", encoding="utf-8") as file:
        file.write(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {TESTS!r})\nimport warm\n"
            f"warm.client({address!r}, {sys.executable!r}, sys.argv[1:])\n"
        )
    os.chmod(program, 0o755)
    # The given path first: it may name a copy of the source with a fault in it.
    paths = [os.environ.get("PYTHONPATH"), os.path.join(os.path.dirname(TESTS), "src"), TESTS]
    server = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), address, program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    _SERVERS.append(server)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server did not start"
    return program


_SERVERS: list[Any] = []


def close() -> None:
    """End the server, if there is one; it also ends when this process does."""
    import shutil

    for server in _SERVERS:
        server.stdin.close()
        server.wait(30)
        server.stdout.close()
        shutil.rmtree(os.path.dirname(server.args[2]))
        if os.environ.get(_SHARED) == server.args[3]:
            del os.environ[_SHARED]
    _SERVERS.clear()
    python.cache_clear()


class Fork(NamedTuple):
    """A process that was asked for; its server tells when it has ended."""

    connection: socket.socket
    pid: int

    def has_ended(self, seconds: float) -> bool:
        """Whether it ended within that time."""
        return bool(select.select([self.connection], [], [], seconds)[0])

    def wait(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        with self.connection:
            return os.waitstatus_to_exitcode(int(self.connection.makefile().readline()))


def fork(address: str, words: list[str], streams: list[int]) -> Fork:
    """Have the server start a process with these words after ``python`` and these standard streams."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps({"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], streams)
    connection.sendall(request)
    return Fork(connection, int.from_bytes(_receive(connection, 8), "big"))


def start(words: list[str], output: int) -> Fork:
    """The same from within a test, without input and with one file for both kinds of output."""
    address = os.path.join(os.path.dirname(python()), "socket")
    with open(os.devnull, "rb") as nothing:
        return fork(address, words, [nothing.fileno(), output, output])


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the other side has hung up")
        parts += part
    return parts


# --- the program ---


def client(address: str, interpreter: str, words: list[str]) -> None:
    """What ``python()`` does; it ends as the fork ends."""
    called = words[1:] if words[:1] == ["-u"] else words  # unbuffered, as torch's launcher wants it: no matter here
    if words != TEST_PROCESS and called[:2] != _MODULE and not (called and called[0].endswith(".py")):
        os.execv(interpreter, [interpreter, *words])
    try:
        process = fork(address, called, [0, 1, 2])
    except OSError:  # the server could not import something: the interpreter cannot either, and says so
        os.execv(interpreter, [interpreter, *words])

    def forward(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    status = process.wait()
    if status < 0:
        with contextlib.suppress(OSError):  # of SIGKILL there is no other way
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# --- the server ---


class Request(NamedTuple):
    """What to start, and where; the numbers of three open files."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]


class Server:
    """Forks for whoever connects, and tells each how its fork ended. One that hangs up before has its fork killed."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._children: dict[int, socket.socket] = {}

    def is_wanted(self) -> bool:
        """Wait for a request, which is left where it is, or for the end of the tests."""
        return 0 not in select.select([0, self._listener.fileno()], [], [])[0]

    def run(self) -> Request | None:
        """The request, in a fork that was made for one; None, in the server, when the tests are over."""
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        signal.set_wakeup_fd(self._waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            waiting = {connection.fileno(): pid for pid, connection in self._children.items()}
            ready, _, _ = select.select([0, self._woken, self._listener.fileno(), *waiting], [], [])
            if 0 in ready:
                for pid in self._children:
                    os.kill(pid, signal.SIGKILL)
                return None
            if self._woken in ready:
                self._reap()
            for pid in (waiting[source] for source in ready if source in waiting):
                if pid in self._children:
                    os.kill(pid, signal.SIGKILL)
                    self._children.pop(pid).close()
            if self._listener.fileno() in ready:
                request = self._fork()
                if request is not None:
                    return request

    def _reap(self) -> None:
        os.read(self._woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self._children.pop(ended[0], None)
                if connection is not None:
                    with contextlib.suppress(OSError), connection:
                        connection.sendall(f"{ended[1]}\n".encode())

    def _fork(self) -> Request | None:
        connection, _ = self._listener.accept()
        size, streams, _, _ = socket.recv_fds(connection, 8, 3)
        if size in (b"", _NOTHING):  # whoever asked has gone, or wants to know that there is somebody
            with contextlib.suppress(OSError), connection:
                connection.sendall(size)
            return None
        content = json.loads(_receive(connection, int.from_bytes(size, "big")))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for ours in (connection, self._listener, *self._children.values()):
                ours.close()
            os.close(self._woken)
            os.close(self._waker)
            return Request(**content, streams=streams)
        for stream in streams:
            os.close(stream)
        self._children[pid] = connection
        with contextlib.suppress(OSError):  # as above: the fork is ended when the connection is looked at
            connection.sendall(pid.to_bytes(8, "big"))
        return None


def warm_up() -> None:
    """Import what commands and tests import, and make a run and a report: much is imported only when it is needed."""
    import tempfile
    from pathlib import Path

    import hypothesis  # before the others: it collects garbage
    import pytest
    import torch
    from accelerate.state import AcceleratorState, GradientState

    import cdpg.cli
    import cdpg.jobs.running
    import tiny
    from cdpg import CDPGConfig, CDPGTrainer
    from cdpg.report import write_report
    from enumeration import contexts_of, tabular

    del hypothesis, pytest, tiny
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    data = [{"prompt": str(context.prompt)} for context in contexts_of(2)]
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        config = CDPGConfig(
            output_dir=folder, epochs=1, contexts_per_epoch=2, num_generations=4, max_completion_length=3,
            device="cpu", check_workers=0, evaluation_samples=2,
        )  # fmt: skip
        CDPGTrainer(tabular(4), lambda prompts, completions: [1.0] * len(prompts), config, data, data).train()
        write_report([Path(folder)], Path(folder) / "report.html")
        with contextlib.redirect_stdout(nowhere):
            cdpg.cli.app(["tasks"], standalone_mode=False)  # typer loads what reads the options of a command
    torch.set_rng_state(state)
    AcceleratorState._reset_state(reset_partial_state=True)  # a fork may be one of several processes
    GradientState._reset_state()


def become(request: Request, program: str) -> None:
    """Be the process that was asked for."""
    take_over(request)
    if request.words == TEST_PROCESS[1:]:
        run_tests()
    else:
        run_script(request, program)


def take_over(request: Request) -> None:
    """Streams, signals, folder, environment and random numbers, as a new process has them."""
    import random

    import numpy as np
    import torch

    for place, stream in enumerate(request.streams):
        os.dup2(stream, place)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    encoding = request.environment.get("PYTHONIOENCODING") or "utf-8"
    sys.stdin = os.fdopen(0, encoding=encoding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)
    random.seed()
    np.random.seed()
    # The pool of threads does not survive a fork. It is made anew here, since the threads that load a model would do
    # so at the same time, which torch does not support.
    torch.set_num_threads(1)


def run_tests() -> None:
    """What xdist sends, as the main module."""
    sys.argv, sys.path[0] = TEST_PROCESS[1:2], ""
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(TEST_PROCESS[2], vars(module))


def run_script(request: Request, program: str) -> None:
    """A script, or the package, as the main module."""
    import importlib.util

    import unpainted

    if request.words[:2] == _MODULE:
        path = os.path.join(os.path.dirname(sys.modules["cdpg"].__file__ or ""), "__main__.py")
        folder, arguments = request.folder, request.words[2:]
    else:
        path = os.path.abspath(request.words[0])
        folder, arguments = os.path.dirname(path), request.words[1:]
    sys.argv, sys.path[0], sys.executable = [path, *arguments], folder, program
    spec = importlib.util.spec_from_file_location("__main__", path)
    assert spec is not None and spec.loader is not None
    sys.modules["__main__"] = module = importlib.util.module_from_spec(spec)
    module.__spec__ = None
    is_painted = not unpainted.IN_A_FORK.items() <= request.environment.items()
    with contextlib.nullcontext() if is_painted else unpainted.unpainted():
        spec.loader.exec_module(module)


def main(address: str, program: str) -> None:
    server = Server(address)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not server.is_wanted():
        return
    # A terminal sends it to all, and whoever started the tests ends them. A fork gets it once it is ready for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    gc.disable()
    warm_up()
    gc.freeze()  # a collection would write to, and so copy, what the forks share
    gc.set_threshold(GARBAGE)
    gc.enable()
    request = server.run()
    if request is not None:
        become(request, program)


if __name__ == "__main__":
    main(*sys.argv[1:])
