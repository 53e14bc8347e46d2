"""Human-readable numbers."""


def as_size(num_bytes: float) -> str:
    """Format bytes as ``1.5 GiB`` or ``310 MiB``."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.1f} GiB"
    return f"{num_bytes / 2**20:,.0f} MiB"


def as_count(number: float) -> str:
    """Format a number with three significant digits, as ``70.6 G`` or ``4.72 M``."""
    number = float(f"{number:.3g}")
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g}"


def as_seconds(seconds: float) -> str:
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
