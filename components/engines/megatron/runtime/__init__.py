"""All modules that import megatron. Importing this package installs the patches that megatron needs here."""

from components.engines.megatron.compat.cpu import install as install_cpu
from components.engines.megatron.compat.no_te import install as install_repairs
from components.engines.megatron.compat.packed_rope import install as install_packed_rope

install_cpu()
install_repairs()
install_packed_rope()
