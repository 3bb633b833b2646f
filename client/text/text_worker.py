"""Worker process of `text_processes`: one model's tokenizer and chat template, job after job.

The process ends when its pipe does, whatever it computes: its reader has a thread of its own, and where a job keeps
that thread from running, the limit of processor time that each job brings ends the process. It heeds no signal but that
one and SIGKILL, so that Ctrl-C and a service manager's SIGTERM leave it to the process that started it.
"""

import array
import json
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final

LENGTHS: Final = struct.Struct("<II")
"""Before each message: the bytes of its header, which is JSON, and of its body."""
MAX_HEADER_BYTES: Final = 2**16
MAX_BODY_BYTES: Final = 2**30
MAX_REASON_CHARACTERS: Final = 500
ID_FORMAT: Final = "I"
"""Token ids in a body: unsigned, 4 bytes each, in the machine's own order."""

Header = dict[str, Any]


def main() -> None:
    """Answers on what was stdout until stdin ends."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b") as nowhere:  # noqa: PTH123 - a device, not a path
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    jobs: queue.SimpleQueue[tuple[Header, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked, jobs), daemon=True).start()
    work = _Work()
    while True:
        header, body = jobs.get()
        _limit_processor_time(header["processor_s"])
        try:
            said, content = work.do(header, body)
        except Exception as error:  # noqa: BLE001 - a job's failure is its own: whoever asked is told
            said = {"memory": True} if _is_for_want_of_memory(error) else {"refused": _reason(error)}
            content = b""
        encoded = json.dumps(said).encode()
        answers.write(LENGTHS.pack(len(encoded), len(content)) + encoded + content)
        answers.flush()


class _Work:
    """The tokenizer, once it is loaded."""

    def __init__(self) -> None:
        from molink.shards.text.tokenizer import Tokenizer

        self._kind = Tokenizer
        self._tokenizer: Tokenizer | None = None

    def do(self, header: Mapping[str, Any], body: bytes) -> tuple[Header, bytes]:
        if header["job"] == "load":
            self._load(header["files"], body, header["memory_bytes"])
            return {}, b""
        if self._tokenizer is None:
            raise RuntimeError("no tokenizer is loaded")
        if header["job"] == "encode":
            ids = self._tokenizer.encode(body.decode())
        else:
            asked = json.loads(body)
            ids = self._tokenizer.apply_chat_template(
                asked["messages"], tools=asked["tools"], variables=asked["variables"]
            )
        return {}, array.array(ID_FORMAT, ids).tobytes()

    def _load(self, lengths: Mapping[str, int], body: bytes, memory_bytes: int) -> None:
        files: dict[str, bytes] = {}
        for name, length in lengths.items():
            files[name], body = body[:length], body[length:]
        if "tokenizer.json" not in files:
            import transformers  # noqa: F401 - converts them; what it maps itself is not the model's doing
        _limit_memory(memory_bytes)
        self._tokenizer = self._kind.from_files(files)


def _is_for_want_of_memory(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MemoryError):
        cause = cause.__cause__
    return cause is not None


def _reason(error: BaseException) -> str:
    """Formats what the template or the tokenizer said, short and printable."""
    text = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
    return "".join(character if character.isprintable() else "?" for character in text)


def _read(asked: BinaryIO, jobs: "queue.SimpleQueue[tuple[Header, bytes]]") -> None:
    while lengths := asked.read(LENGTHS.size):
        if len(lengths) < LENGTHS.size:
            break
        header_bytes, body_bytes = LENGTHS.unpack(lengths)
        header, body = asked.read(header_bytes), asked.read(body_bytes)
        if len(header) < header_bytes or len(body) < body_bytes:
            break
        jobs.put((json.loads(header), body))
    os._exit(0)


def _limit_memory(more_bytes: int) -> None:
    """From now on the process maps at most so much more, where the system can hold it to that."""
    if sys.platform == "win32":
        return
    import resource

    import psutil

    limit = psutil.Process().memory_info().vms + more_bytes
    with suppress(ValueError, OSError):  # macOS refuses; there, whoever started this process watches it
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_processor_time(more_s: float) -> None:
    if sys.platform == "win32":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + more_s) + 1
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
