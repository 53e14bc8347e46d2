"""From a composed config to checked objects."""
