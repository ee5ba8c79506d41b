"""deployment_causes.py: one line of what Ray Serve says of deployments."""

from __future__ import annotations

from kvferry.util.deployment_causes import cause_of, causes_of

REFUSAL = "decode.engine.args.watermark: vLLM refuses it: Input should be less than 1"
TRACEBACK = f"""Traceback (most recent call last):
  File "app.py", line 81, in __init__
    await self._host.start()
kvferry.errors.UnsupportedEngine: {REFUSAL}

The above exception was the direct cause of the following exception:

RuntimeError: Traceback (most recent call last):
  File "replica.py", line 1
    raise RuntimeError(traceback.format_exc()) from None
"""
RETRYING = "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
GIVEN_UP = (
    "The deployment failed to start 3 times in a row. This may be due to a problem with its constructor or initial "
    "health check failing. See controller logs for details. Error:\n"
)


def test_a_cause_begins_with_the_engines_refusal_and_its_key() -> None:
    assert cause_of(RETRYING + TRACEBACK) == (
        f"{REFUSAL} (A replica failed to start with exception. Retrying 2 more time(s).)"
    )
    assert cause_of(GIVEN_UP + TRACEBACK) == f"{REFUSAL} (The deployment failed to start 3 times in a row.)"


def test_other_errors_are_the_end_of_the_traceback() -> None:
    assert cause_of(RETRYING + "Traceback:\nModuleNotFoundError: No module named 'x'\n").startswith(
        "No module named 'x' ("
    )
    assert (
        cause_of("Deployment 'X' has 1 replicas that wait for GPUs.\n")
        == "Deployment 'X' has 1 replicas that wait for GPUs."
    )
    slow = "Deployment 'Gateway' has 1 replicas that have taken more than 30s to initialize."
    assert cause_of(f"{slow}\nThis may be caused by a slow __init__ or reconfigure method.") == slow
    assert cause_of(f"{slow} This may be caused by a slow __init__ or reconfigure method.") == slow
    assert cause_of(" \n") == ""


def test_causes_have_the_deployments_names_and_a_limit() -> None:
    messages = {f"DecodeWorker-{number}": RETRYING + "kvferry.errors.X: " + "\u00df" * 10_000 for number in range(100)}
    shown = causes_of({"PrefillWorker": "", **messages})
    assert shown.startswith("DecodeWorker-0: \u00df")
    assert shown.endswith("; and 96 more")
    assert "PrefillWorker" not in shown
    assert len(shown.encode()) < 3000
    assert "\n" not in shown
    assert causes_of({"PrefillWorker": ""}) == ""


def test_no_terminal_obeys_what_a_message_says() -> None:
    assert cause_of("the template refuses: \x1b[2J\x1b]0;x\x07") == "the template refuses: \ufffd[2J\ufffd]0;x\ufffd"
