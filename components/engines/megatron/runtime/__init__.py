"""All modules that import megatron. Importing this package installs the patches that megatron needs here."""

from components.engines.megatron.compat import no_te, packed_rope, pipeline_sends
from components.engines.megatron.compat.cpu import install as install_cpu
from components.engines.megatron.compat.gradient_fusion import install as install_gradient_fusion
from components.engines.megatron.compat.patching import install as install_patches
from components.engines.megatron.compat.unused_packages import hidden

# wandb takes half a second to import, and leaves two temporary folders because ranks end with os._exit.
with hidden("wandb"):
    install_cpu()
    install_patches((*no_te.PATCHES, *packed_rope.PATCHES, *pipeline_sends.PATCHES))
    install_gradient_fusion()
    import megatron.core.inference.contexts.dynamic_context
    import megatron.core.timers  # noqa: F401
