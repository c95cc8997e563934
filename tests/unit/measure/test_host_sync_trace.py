"""The waits in a profiler's trace; tests/cuda/test_waiting.py checks those of steps on a device."""

from tests.support.host_sync_trace import _STEP, Event, read


def test_only_waits_within_the_step_are_counted() -> None:
    events = [
        Event("cudaDeviceSynchronize", False, 0, 1),
        Event(_STEP, False, 10, 20),
        Event(_STEP, True, 11, 30),
        Event("cudaLaunchCooperativeKernel", False, 11, 12),
        Event("void fused_kernel<int>(int)", True, 13, 40),
        Event("cudaStreamSynchronize", False, 15, 40),  # on a thread of its own
        Event("cudaEventQuery", False, 16, 17),
        Event("cudaMemcpyAsync", False, 12, 13),
        Event("Memcpy DtoH (Device -> Pinned)", True, 40, 41),
        Event("cudaDeviceSynchronize", False, 21, 50),
    ]
    trace = read(events)
    assert trace.waits == ["cudaStreamSynchronize"]
    assert trace.ran("fused_kernel") and not trace.ran("expand_kernel")
    assert read([*events, Event("Memcpy DtoH (Device -> Pageable)", True, 42, 43)]).waits[1:] == [
        "Memcpy DtoH (Device -> Pageable)"
    ]
    assert read([*events, Event("cudaMemcpy", False, 17, 18)]).waits[1:] == ["cudaMemcpy"]
