"""All modules that import megatron. Importing this package installs the patches that megatron needs here."""

from components.engines.megatron.compat import packed_rope
from components.engines.megatron.compat.cpu import install as install_cpu
from components.engines.megatron.compat.no_te import install as install_repairs
from components.engines.megatron.compat.patching import install as install_patches

install_cpu()
install_repairs()
install_patches(packed_rope.PATCHES)
