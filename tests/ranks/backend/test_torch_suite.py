"""A slice of torch's own tests of torch.distributed on backend "dtcomm".

`python -m tests.stress.torch_suite` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dtcomm.launch.ranks import run_ranks
from tests.stress.torch_suite_rank import environment, make_folders, run_tests

ON_ALL_RANKS = (
    "test_get_backend",
    "test_destroy_full_group",
    "test_send_recv",
    "test_send_recv_with_tag",
    "test_send_recv_any_source",
    "test_isend",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_reduce_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_sparse_all_reduce_sum",
    "test_all_reduce_coalesced_max",
    "test_gather",
    "test_scatter_complex",
    "test_all_gather_complex",
    "test_all_gather_coalesced_simple",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split_full_group",
    "test_all_gather_object_default_pg",
    "test_scatter_object_list",
    "test_barrier_timeout_full_group",
    "test_monitored_barrier_gloo",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_static_graph_api_cpu",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_logging_data_cpu",
)
IN_SUBGROUPS = (  # of ranks 1 and 2
    "test_get_rank_size_group",
    "test_broadcast_group",
    "test_reduce_group_max",
    "test_all_reduce_group_sum",
    "test_all_reduce_coalesced_group_sum",
    "test_gather_group",
    "test_scatter_group",
    "test_all_gather_group",
    "test_all_gather_object_subgroup",
    "test_all_to_all_single_equal_split_group",
    "test_all_to_all_group",
    "test_monitored_barrier_gloo_subgroup",
)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "tests"), [(2, ON_ALL_RANKS), (3, IN_SUBGROUPS)])
def test_torchs_own_tests(tmp_path: Path, world_size: int, tests: tuple[str, ...]) -> None:
    make_folders(tmp_path, tests)
    try:
        skipped = run_ranks(
            run_tests,
            world_size,
            "dtcomm",
            tests,
            str(tmp_path),
            backend=None,
            fresh=True,
            env=environment(world_size, tmp_path),
            timeout=120,
        )
    except ImportError as error:
        pytest.skip(f"torch's tests cannot be used: {error}")
    assert skipped == [{}] * world_size
