"""The gates, one module each, in order.

A package, because ``pytest --pyargs pytest_kvqual.qualification`` finds no other.
"""
