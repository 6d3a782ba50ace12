"""vLLM's metrics as its dashboards know them (0.32): name -> type, labels beside model_name and engine, buckets.

Left out is what Pagemill has no such thing as: LoRA adapters, speculation, multi-modal caches, KV connectors and their
stages, sleep modes, estimated FLOPs of GPUs; and the residency of KV blocks, which vLLM samples only on request.
"""

from __future__ import annotations

LATENCY = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
]
FIRST_TOKEN = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
]
NEXT_TOKEN = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
]
LENGTHS_TO_8192 = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0]
STEP_TOKENS = [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0]

GAUGES: dict[str, dict[str, set[str]]] = {
    "vllm:num_requests_running": {},
    "vllm:num_requests_waiting": {},
    "vllm:num_requests_waiting_by_reason": {"reason": {"capacity", "deferred"}},
    "vllm:kv_cache_usage_perc": {},
    "vllm:cache_config_info": {
        name: set()
        for name in (
            *("block_size", "num_gpu_blocks", "num_gpu_blocks_override", "cache_dtype", "enable_prefix_caching"),
            "gpu_memory_utilization",
        )
    },
}
COUNTERS: dict[str, dict[str, set[str]]] = {
    "vllm:prefix_cache_queries": {},
    "vllm:prefix_cache_hits": {},
    "vllm:num_preemptions": {},
    "vllm:prompt_tokens": {},
    "vllm:prompt_tokens_by_source": {"source": {"local_compute", "local_cache_hit", "external_kv_transfer"}},
    "vllm:prompt_tokens_cached": {},
    "vllm:prompt_tokens_cached_by_source": {"source": {"device", "host", "p2p", "disk", "external_unspecified"}},
    "vllm:generation_tokens": {},
    "vllm:request_success": {"finished_reason": {"stop", "length", "abort", "error"}},
    "vllm:corrupted_requests": {},
    "vllm:admission_rejections": {"reason": {"max_num_queued_reqs", "max_num_queued_tokens"}},
}
WITHOUT_ENGINE = {"vllm:admission_rejections"}
"""vLLM counts these before any engine is chosen."""
HISTOGRAMS: dict[str, list[float]] = {
    "vllm:time_to_first_token_seconds": FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": NEXT_TOKEN,
    "vllm:time_per_output_token_seconds": NEXT_TOKEN,  # its older name, which many dashboards still ask for
    "vllm:request_time_per_output_token_seconds": NEXT_TOKEN,
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:request_queue_time_seconds": LATENCY,
    "vllm:request_inference_time_seconds": LATENCY,
    "vllm:request_prefill_time_seconds": LATENCY,
    "vllm:request_decode_time_seconds": LATENCY,
    "vllm:request_prompt_tokens": LENGTHS_TO_8192,
    "vllm:request_generation_tokens": LENGTHS_TO_8192,
    "vllm:request_max_num_generation_tokens": LENGTHS_TO_8192,
    "vllm:request_params_max_tokens": LENGTHS_TO_8192,
    "vllm:request_prefill_kv_computed_tokens": LENGTHS_TO_8192,
    "vllm:request_params_n": [1.0, 2.0, 5.0, 10.0, 20.0],
    "vllm:request_num_preemptions": [1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0],
    "vllm:iteration_tokens_total": STEP_TOKENS,
}
