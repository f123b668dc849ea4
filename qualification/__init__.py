"""The gates, one module each, in order. A package, so that ``pytest --pyargs pytest_kvqual.qualification`` finds them."""
