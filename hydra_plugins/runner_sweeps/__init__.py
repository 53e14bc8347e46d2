"""Hydra plugins: launchers, a sweeper and a callback. Hydra imports every module here when it starts."""
