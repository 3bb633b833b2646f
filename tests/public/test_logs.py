"""Logs in JSON: one object in each line, whatever is logged."""

import json
import logging
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from support.deadline import DEADLINE_S

from molink.logs import JsonFormatter


def formatted(message: object, *arguments: object, **more: object) -> dict[str, object]:
    record = logging.getLogger("molink.test").makeRecord(
        "molink.test", logging.WARNING, "test.py", 1, message, arguments, None, extra=more
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    content: dict[str, object] = json.loads(line)
    return content


@given(st.text())
def test_each_record_is_one_line_of_json(message: str) -> None:
    content = formatted("%s", message)
    assert content["message"] == message
    assert (content["level"], content["logger"]) == ("warning", "molink.test")
    assert str(content["time"]).endswith("+00:00")


def test_fields_that_come_with_a_record_stand_beside_its_message() -> None:
    content = formatted("answered", request_id="req_1", status=200, odd=object)
    assert (content["request_id"], content["status"]) == ("req_1", 200)
    assert isinstance(content["odd"], str)


def test_an_error_is_named_and_its_traceback_is_in_the_same_line() -> None:
    def fail() -> None:
        raise ValueError("why")

    try:
        fail()
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    content = json.loads(JsonFormatter().format(record))
    assert content["error"] == "ValueError"
    assert "in fail" in content["traceback"]


def test_lines_for_people_are_records_too_once_records_are_json() -> None:
    program = (
        "import logging\n"
        "from molink.commands import start_logging, tell\n"
        "from molink.logs import log_as_json\n"
        "start_logging(verbose=True, debug=False)\n"
        "tell('before')\n"
        "log_as_json()\n"
        "tell('after')\n"
        "logging.getLogger('molink.test').info('logged')\n"
        "logging.getLogger('other').info('not for us')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    before, *records = done.stderr.splitlines()
    assert before == "before"
    assert [json.loads(line)["message"] for line in records] == ["after", "logged"]
    assert [json.loads(line)["logger"] for line in records] == ["molink", "molink.test"]
