"""Kernels in people's programs: a folder of kernels for one definition, loaded and called.

`manifest` is the folder's format, `call` what `ptxflow.load` returns, `torch_op` its torch
operator. It needs torch and an NVIDIA driver, nothing else of ptxflow but what launches kernels.
"""
