"""A rehearsal: train steps of any rank's engine on fake CUDA tensors, without a GPU and without other ranks.

Tensors in host memory are real. A tensor on ``cuda`` has only a shape, a dtype and a device (torch's
``FakeTensor``); small integer tensors also have values. Process groups are torch's fake ones. A rehearsal
needs a process of its own, because it replaces ``torch.cuda`` and parts of ``torch.distributed``.
"""
