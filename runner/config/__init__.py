"""Conversion of a composed config into checked objects."""
