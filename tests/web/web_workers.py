"""Workers that compute nothing, importable by the processes that the tests start."""

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from menet.errors import ConfigurationError
from menet.web.workers import limit_memory, serve_pipe


def answer(action: str, request: dict[str, Any]) -> Any:
    what = request.get("what")
    if what == "sleep":
        time.sleep(request["seconds"])
    elif what == "die":
        os._exit(1)
    elif what == "allocate":
        return {"bytes": len(bytearray(request["bytes"]))}
    elif what == "invalid":
        raise ConfigurationError("expected p <= 1, got 2")
    elif what == "fault":
        raise KeyError("planted")
    return {"action": action, "pid": os.getpid(), "bytes": len(request.get("data", b""))}


def light(pipe: Connection, memory: int) -> None:
    limit_memory(memory)
    pipe.send(("ready", None))
    serve_pipe(pipe, answer)
