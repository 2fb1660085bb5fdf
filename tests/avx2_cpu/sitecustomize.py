"""Makes torch report a CPU with AVX2 alone; with this folder on PYTHONPATH, in child processes too.

``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`` makes its kernels those of such a CPU; the flags that
narrowcast reads come from the CPU itself, so they are replaced here, when ``torch.cpu`` is imported.
"""

import importlib.abc
import importlib.machinery
import sys

NEWER = ("avx512", "amx", "avx10", "vnni")


class _OlderCpu(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            read = module.get_capabilities
            module.get_capabilities = lambda: {
                flag: False if flag.startswith(NEWER) else value for flag, value in read().items()
            }

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _OlderCpu())
