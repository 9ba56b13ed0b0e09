"""The tests of PyTorch's suite that run with our hook, by the class of torch_suite.py that runs them."""

TESTS = {
    "Registered": [
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    ],
    "RegisteredOnCpu": [
        "test_ddp_hook_parity_allreduce",
        "test_ddp_hook_parity_allreduce_process_group",
        "test_ddp_hook_parity_powerSGD",
        "test_ddp_hook_parity_post_localSGD",
        "test_ddp_uneven_inputs",
    ],
    "Constructed": [
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_ddp_create_graph",
        "test_ddp_logging_data_cpu",
        "test_grads_same_across_ranks_with_no_sync",
        "test_static_graph_api_cpu",
    ],
    "ConstructedOnCpu": [
        "test_DistributedDataParallel_with_amp_and_grad_is_view",
        "test_ddp_broadcast_buffer_via_hook",
        "test_ddp_bucket_cap_mb_list",
        "test_ddp_buffer_hook_allreduce",
        "test_ddp_buffer_hook_allreduce_return_future",
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_control_flow_same_across_ranks",
        "test_ddp_join_model_equivalence",
        "test_ddp_shared_grad_acc_unused_params",
        "test_ddp_static_graph_nested_types",
        "test_ddp_uneven_input_join_disable",
        "test_different_graph_across_ranks",
    ],
}
