"""Everything that imports megatron. Importing this package first makes megatron work on this machine."""

from components.engines.megatron.cpu import install as install_cpu
from components.engines.megatron.repairs import install as install_repairs

install_cpu()
install_repairs()
