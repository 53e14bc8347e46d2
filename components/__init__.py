import logging

# These libraries warn about kernels that are not used here and about their own use of torch, even if only
# peft imports them.
for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
