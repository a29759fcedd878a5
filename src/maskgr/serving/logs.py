"""One JSON object a line, on standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("maskgr.serving")


def log(event: str, *, level: int = logging.INFO, exception: bool = False, **values: Any) -> None:
    """Keys and bodies are never passed here."""
    if LOGGER.isEnabledFor(level):
        info = sys.exc_info() if exception else None
        record = LOGGER.makeRecord(
            LOGGER.name, level, __file__, 0, event, (), info, extra={"values": values}
        )  # without looking for the caller, which nobody reads here
        LOGGER.handle(record)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time,
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr() -> None:
    """For the command; a program that embeds the service sets up logging itself."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("maskgr.serving", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name.startswith("maskgr") else logging.WARNING)
