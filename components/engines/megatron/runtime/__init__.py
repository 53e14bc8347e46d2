"""Everything that imports megatron. Importing this package first makes megatron work on this machine."""

from components.engines.megatron.compat.cpu import install as install_cpu
from components.engines.megatron.compat.no_te import install as install_repairs

install_cpu()
install_repairs()
