"""Products of matrices of bfloat16 numbers by the best that this processor has: AMX's tiles, or vectors."""

from fathom.kernels import amx_cpu, bfloat16_cpu

_best = amx_cpu if amx_cpu.has_amx() else bfloat16_cpu

ROWS = _best.ROWS
"""The left side of a product has a multiple of so many rows."""
begin_products, end_products = _best.begin_products, _best.end_products
product, add_product = _best.product, _best.add_product
