"""A rehearsal: train steps of any rank's engine on fake CUDA tensors, without a GPU and without other ranks.

Tensors in host memory are real. Of a tensor on ``cuda`` only shape, dtype and device exist (torch's
``FakeTensor``), besides the values of small integer tensors. Process groups are torch's fake ones. It needs a
process of its own, because it replaces ``torch.cuda`` and parts of ``torch.distributed``.
"""
