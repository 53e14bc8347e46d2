import logging

# They warn about kernels that are not used here and about their own use of torch, also if peft imports them.
for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
