"""engine/vllm/plugins/absent_images.py"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


def request(*images: tuple[bool, int, int]) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

    features = [
        MultiModalFeatureSpec(MultiModalKwargsItem.dummy() if here else None, "image", "a", PlaceholderRange(at, size))
        for here, at, size in images
    ]
    return SimpleNamespace(request_id="r", mm_features=features, has_encoder_inputs=bool(features))


class TestAbsentImages:
    def test_vllm_still_schedules_images_and_ends_requests_in_this_way(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from kvferry.engine.vllm.plugins import absent_images

        expected = ["self", "request", "num_computed_tokens", "num_new_tokens", "encoder_compute_budget"]
        assert parameters(absent_images._plain) == [*expected, "shift_computed_tokens"]
        calls = inspect.getsource(Scheduler.schedule)
        assert calls.count("self._try_schedule_encoder_inputs(") == calls.count("shift_computed_tokens=") == 2
        ends = inspect.getsource(Scheduler.update_from_output)
        assert "error_req_ids.update(self.encoder_cache_mismatch_reqs)" in ends
        assert "RequestStatus.FINISHED_ERROR" in ends

    def test_a_request_ends_only_while_tokens_of_an_absent_image_are_not_computed(self) -> None:
        from kvferry.engine.vllm.plugins.absent_images import needs_absent_image

        absent = request((False, 4, 10))
        assert [needs_absent_image(absent, computed) for computed in (0, 4, 13, 14, 40)] == [True] * 3 + [False] * 2
        assert not needs_absent_image(request((True, 4, 10)), 0)
        assert needs_absent_image(request((True, 0, 4), (False, 4, 10)), 4)
        assert not needs_absent_image(request(), 0)

    def test_such_a_request_is_given_to_vllm_to_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from kvferry.engine.vllm.plugins import absent_images

        plain = Scheduler._try_schedule_encoder_inputs
        monkeypatch.setattr(Scheduler, "_try_schedule_encoder_inputs", plain)  # put back at the end
        absent_images.end_requests_of_absent_images()
        absent_images.end_requests_of_absent_images()
        scheduler = SimpleNamespace(encoder_cache_mismatch_reqs=set())
        schedule = Scheduler._try_schedule_encoder_inputs
        result = schedule(scheduler, request((False, 4, 10)), 0, 20, 100, shift_computed_tokens=0)
        assert result == ([], 0, 100, [], [])
        assert scheduler.encoder_cache_mismatch_reqs == {"r"}
        scheduler.encoder_cache_mismatch_reqs.clear()
        assert schedule(scheduler, request(), 0, 20, 100, shift_computed_tokens=0) == ([], 20, 100, [], [])
        assert schedule(scheduler, request((False, 4, 10)), 0, 0, 100) == ([], 0, 100, [], [])
        assert not scheduler.encoder_cache_mismatch_reqs
