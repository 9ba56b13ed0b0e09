"""Ok-Topk inside DistributedDataParallel."""
